//! Behaviour on a machine without CUDA. With CUDA, checks only that none of it is loaded unasked.

use tcpx_cuda::{DeviceBuffer, Error, device, devices, locate};

/// Returns whether the process has loaded the CUDA driver.
fn is_loaded() -> bool {
    std::fs::read_to_string("/proc/self/maps")
        .unwrap()
        .contains("libcuda.so")
}

// A single test, because loading affects the whole process.
#[test]
fn host_memory_needs_no_cuda_and_errors_say_why_there_is_none() {
    let bytes = vec![0_u8; 100_000];
    for address in [bytes.as_ptr().addr(), 0, usize::MAX] {
        assert!(locate(address, bytes.len()).unwrap().is_none());
    }
    assert!(!is_loaded(), "asking for host memory has loaded CUDA");

    match devices() {
        Err(error @ Error::NoLibrary { .. }) => {
            let text = error.to_string();
            assert!(
                text.contains("libcuda.so.1") && text.contains("NVIDIA driver"),
                "{text}"
            );
            assert!(matches!(device(0), Err(Error::NoLibrary { .. })));
            assert!(matches!(
                DeviceBuffer::alloc(0, 1),
                Err(Error::NoLibrary { .. })
            ));
        }
        // A driver without a GPU, or a broken one, reports that too.
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(devices) => {
            let count = devices.len() as u32;
            let error = device(count).map(|_| ()).unwrap_err();
            assert_eq!(
                error,
                Error::NoSuchDevice {
                    ordinal: count,
                    count
                }
            );
        }
    }
    assert!(
        locate(bytes.as_ptr().addr(), bytes.len())
            .unwrap()
            .is_none()
    );
}
