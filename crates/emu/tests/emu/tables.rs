//! Symbols, table layouts, properties.

use std::ffi::{CStr, c_int, c_void};

use nccl_net_tcpx_emu::tables::{PropertiesV6, PropertiesV7, PropertiesV8};

use crate::harness::{Plugin, logger, net};

/// Reads a field from a zeroed, oversized buffer, as a careful loader does.
fn field<T: Copy>(buffer: &[u64; 32], offset: usize) -> T {
    assert!(offset + size_of::<T>() <= size_of_val(buffer));
    // SAFETY: within the buffer; the fields are plain numbers and pointers.
    unsafe {
        buffer
            .as_ptr()
            .cast::<u8>()
            .add(offset)
            .cast::<T>()
            .read_unaligned()
    }
}

isolated! {
    fn the_versions_that_are_exported() {
        let plugin = Plugin::load();
        for (name, there) in [
            (c"ncclNetPlugin_v4", false),
            (c"ncclNetPlugin_v5", false),
            (c"ncclNetPlugin_v6", true),
            (c"ncclNetPlugin_v7", true),
            (c"ncclNetPlugin_v8", true),
            (c"ncclNetPlugin_v9", false),
            (c"ncclNetPlugin_v12", false),
            (c"ncclCollNetPlugin_v7", false),
        ] {
            assert_eq!(plugin.exports(name), there, "{name:?}");
        }
        // SAFETY: static strings.
        let names = unsafe {
            [plugin.v6.name, plugin.v7.name, plugin.v8.name].map(|name| CStr::from_ptr(name))
        };
        assert_eq!(names, [c"Socket_v6", c"GPUDirectTCPX_v7", c"Socket_v8"]);
    }
}

isolated! {
    fn members_stand_where_the_headers_put_them() {
        let plugin = Plugin::load();
        // SAFETY: the tables are 17 and 19 words long.
        let (v6, v7, v8) = unsafe {
            (
                &*std::ptr::from_ref(plugin.v6).cast::<[usize; 17]>(),
                &*std::ptr::from_ref(plugin.v7).cast::<[usize; 19]>(),
                &*std::ptr::from_ref(plugin.v8).cast::<[usize; 19]>(),
            )
        };
        // Everything but regMrDmaBuf (byte 64) is set; plain v8 also lacks the last two.
        for (word, pointer) in v7.iter().enumerate() {
            assert_eq!(*pointer == 0, word == 8, "v7 word {word}");
        }
        for (word, pointer) in v6.iter().enumerate() {
            assert_eq!(*pointer == 0, word == 8, "v6 word {word}");
        }
        for (word, pointer) in v8.iter().enumerate() {
            assert_eq!(*pointer == 0, [8, 17, 18].contains(&word), "v8 word {word}");
        }
        // By offset, as a loader without these types would: init at 8, devices at 16.
        assert_eq!(net!(plugin.v7, init(Some(logger()))), 0);
        let mut devices: c_int = 0;
        // SAFETY: the word at byte 16 is `devices`.
        let function = unsafe {
            std::mem::transmute::<usize, unsafe extern "C" fn(*mut c_int) -> c_int>(v7[2])
        };
        // SAFETY: a place for the number.
        assert_eq!(unsafe { function(&raw mut devices) }, 0);
        assert_eq!(devices, 2);
    }
}

isolated! {
    fn properties_of_each_version() {
        let plugin = Plugin::init();
        assert_eq!(net!(plugin.v8, init(Some(logger()))), 0);
        for dev in 0..2 {
            let mut buffer = [0u64; 32];
            let raw = buffer.as_mut_ptr();
            assert_eq!(net!(plugin.v7, get_properties(dev, raw.cast::<PropertiesV7>())), 0);
            // SAFETY: a string of the plugin's.
            let name = unsafe { CStr::from_ptr(field(&buffer, 0)) };
            assert_eq!(name.to_str().unwrap(), format!("emu{dev}"));
            assert_eq!(field::<u64>(&buffer, 16), dev as u64, "guid");
            let numbers = [24, 28, 32, 40, 44, 48, 52].map(|at| field::<c_int>(&buffer, at));
            assert_eq!(numbers, [3, 10_000, 0, 65_536, 1, 1, 7]);
            assert_eq!(buffer[7..], [0; 25], "nothing past 56 bytes");

            let mut buffer = [0u64; 32];
            let raw = buffer.as_mut_ptr();
            assert_eq!(net!(plugin.v6, get_properties(dev, raw.cast::<PropertiesV6>())), 0);
            let numbers = [24, 28, 32, 40, 44].map(|at| field::<c_int>(&buffer, at));
            assert_eq!(numbers, [1, 10_000, 0, 65_536, 1]);
            assert_eq!(buffer[6..], [0; 26], "nothing past 48 bytes");

            let mut buffer = [0u64; 32];
            let raw = buffer.as_mut_ptr();
            assert_eq!(net!(plugin.v8, get_properties(dev, raw.cast::<PropertiesV8>())), 0);
            let numbers = [24, 28, 32, 36, 44, 48, 52, 56].map(|at| field::<c_int>(&buffer, at));
            assert_eq!(numbers, [1, 0, 10_000, 0, 65_536, 1, 0, 0]);
        }
        let mut buffer = [0u64; 32];
        let raw = buffer.as_mut_ptr().cast::<PropertiesV7>();
        assert_eq!(net!(plugin.v7, get_properties(2, raw)), 3);
        assert_eq!(net!(plugin.v7, get_properties(-1, raw)), 3);
        assert_eq!(net!(plugin.v7, get_properties(0, std::ptr::null_mut())), 3);
        assert_eq!(buffer, [0; 32]);
    }
}

isolated! {
    fn init_once_and_first() {
        let plugin = Plugin::load();
        let mut devices = 77;
        assert_eq!(net!(plugin.v7, devices(&raw mut devices)), 3, "before init");
        assert_eq!(devices, 77);
        assert_eq!(net!(plugin.v7, init(Some(logger()))), 0);
        assert_eq!(net!(plugin.v7, init(Some(logger()))), 3, "a second time");
        // The plain tables are separate plugins in the same library, and accept a second `init`.
        assert_eq!(net!(plugin.v8, init(None)), 0);
        assert_eq!(net!(plugin.v8, init(None)), 0);
        assert_eq!(plugin.counters(std::ptr::null_mut()).violations, 2);
    }
}

isolated! {
    fn members_that_do_little() {
        let plugin = Plugin::init();
        let null = std::ptr::null_mut::<c_void>();
        assert_eq!(net!(plugin.v7, close_send(null)), 0);
        assert_eq!(net!(plugin.v7, close_recv(null)), 0);
        assert_eq!(net!(plugin.v7, close_listen(null)), 0);
        assert_eq!(net!(plugin.v7, dereg_mr(null, null)), 0);
        let mut untouched = 5 as *mut c_void;
        assert_eq!(net!(plugin.v7, get_device_mr(null, null, &raw mut untouched)), 0);
        assert_eq!(untouched as usize, 5);
        let lists = std::ptr::null_mut();
        let flush = net!(plugin.v7, iflush(null, 1, lists, std::ptr::null_mut(), lists, lists));
        assert_eq!(flush, 3);
    }
}
