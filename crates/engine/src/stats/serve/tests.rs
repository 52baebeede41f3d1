use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::AtomicUsize;

use super::*;

struct Fixed(&'static str);

impl Source for Fixed {
    fn read(&self) -> SessionStats {
        SessionStats {
            name: self.0.into(),
            ..SessionStats::default()
        }
    }
}

/// Registers a source at an address.
fn serve(name: &'static str, asked: MetricsAddress) -> (Arc<dyn Source>, Registration) {
    let source: Arc<dyn Source> = Arc::new(Fixed(name));
    let asked = Asked::Metrics(asked);
    let registration = register(asked, Arc::downgrade(&source)).expect("it is served");
    (source, registration)
}

/// Returns a port that was free a moment ago, at another address for each call.
fn free() -> MetricsAddress {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let ip = [127, 0, 77, 1 + NEXT.fetch_add(1, Ordering::Relaxed) as u8].into();
    let listener = std::net::TcpListener::bind(SocketAddr::new(ip, 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    MetricsAddress {
        ip,
        first_port: port,
        last_port: port,
    }
}

fn connect(address: MetricsAddress) -> TcpStream {
    TcpStream::connect(SocketAddr::new(address.ip, address.first_port)).unwrap()
}

fn ask(address: MetricsAddress, request: &str) -> String {
    let mut stream = connect(address);
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

const GET: &str = "GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n";

#[test]
fn sessions_share_an_address_and_leave_it_with_the_last() {
    let address = free();
    let (_alice, first) = serve("alice", address);
    let (_bob, second) = serve("bob", address);
    let page = ask(address, GET);
    assert!(page.starts_with("HTTP/1.1 200 OK\r\n"), "{page}");
    assert!(page.contains("session=\"alice\"") && page.contains("session=\"bob\""));
    assert!(page.ends_with("# EOF\n"));
    drop(first);
    let page = ask(address, GET);
    assert!(!page.contains("session=\"alice\"") && page.contains("session=\"bob\""));
    drop(second);
    let again = std::net::TcpListener::bind(SocketAddr::new(address.ip, address.first_port));
    assert!(again.is_ok(), "the port is free again");
}

#[test]
fn other_requests_are_refused() {
    let address = free();
    let _served = serve("alice", address);
    let cases = [
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), "HTTP/1.1 404 "),
        ("POST /metrics HTTP/1.1\r\n\r\n".to_owned(), "HTTP/1.1 405 "),
        ("\r\n\r\n".to_owned(), "HTTP/1.1 405 "),
        (
            "GET /metrics?x=1 HTTP/1.1\r\n\r\n".to_owned(),
            "HTTP/1.1 200 ",
        ),
        ("a".repeat(MAX_REQUEST), "HTTP/1.1 431 "),
    ];
    for (request, status) in cases {
        let answer = ask(address, &request);
        assert!(answer.starts_with(status), "{request:.40}: {answer}");
    }
}

#[test]
fn scrapers_that_stall_keep_nobody_else_from_being_served() {
    let address = free();
    let _served = serve("alice", address);
    let stalled: Vec<_> = (0..MAX_CLIENTS - 1)
        .map(|_| {
            let mut stream = connect(address);
            stream.write_all(b"GET /metrics HTTP/1.1\r\n").unwrap();
            stream
        })
        .collect();
    assert!(ask(address, GET).starts_with("HTTP/1.1 200 "));
    // One more stalled client reaches the limit: the next is served once the time of these is over.
    let _last = connect(address);
    assert!(ask(address, GET).starts_with("HTTP/1.1 200 "));
    drop(stalled);
}

#[test]
fn a_listener_rests_after_a_failure_to_accept() {
    static ATTEMPTS: AtomicUsize = AtomicUsize::new(0);
    let attempts = || ATTEMPTS.load(Ordering::Relaxed);
    let address = free();
    let asked = Asked::Metrics(address);
    let mut door = Door::open(&asked).unwrap();
    door.accept = |listener| match ATTEMPTS.fetch_add(1, Ordering::Relaxed) {
        0 | 1 => Err(io::Error::other("too many open files")),
        _ => listener.accept().map(|(stream, _)| stream),
    };
    let poller = Poller::new().unwrap();
    poller.add(&door.listener, LISTENER).unwrap();
    let mut serving = Loop {
        server: Arc::new(Server {
            process: std::process::id(),
            asked,
            sources: Mutex::default(),
            is_over: AtomicBool::new(false),
            waker: poller.waker(),
            thread: Mutex::new(None),
        }),
        poller,
        door,
        rests_until: None,
        clients: Vec::new(),
        next: LISTENER + 1,
    };
    let _waiting = connect(address);
    let events = |serving: &Loop| {
        let mut events = Vec::new();
        serving
            .poller
            .wait(&mut events, Some(Duration::ZERO))
            .unwrap();
        events
    };
    let mut now = Instant::now();
    for failures in 1..=2 {
        assert_eq!(serving.prepare(now), None);
        assert_eq!(events(&serving), [Event::Ready(LISTENER)]);
        serving.accept(now);
        assert_eq!(attempts(), failures, "one attempt");
        // The connection is still in the queue, and is not reported before the rest is over.
        for elapsed in [Duration::ZERO, REST / 2] {
            assert_eq!(serving.prepare(now + elapsed), Some(REST - elapsed));
            assert_eq!(events(&serving), []);
        }
        now += REST;
    }
    assert_eq!(serving.prepare(now), None);
    assert_eq!(events(&serving), [Event::Ready(LISTENER)]);
    serving.accept(now);
    assert_eq!(serving.clients.len(), 1);
    assert_eq!(attempts(), 4, "the last finds the queue empty");
    assert_eq!(serving.rests_until, None, "an empty queue is no failure");
    assert_eq!(serving.prepare(now), Some(PATIENCE));
}

#[test]
fn a_port_that_is_taken_is_passed_over_in_a_range_and_warned_of_alone() {
    let taken = free();
    let (_other, _registration) = serve("other", taken);
    let source: Arc<dyn Source> = Arc::new(Fixed("alice"));
    // Name a range, not the same port: an equal address would share the server.
    let range = MetricsAddress {
        last_port: taken.first_port.saturating_add(20),
        ..taken
    };
    assert!(register(Asked::Metrics(range), Arc::downgrade(&source)).is_some());
    let listener = std::net::TcpListener::bind("127.0.78.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let alone = MetricsAddress {
        ip: [127, 0, 78, 1].into(),
        first_port: port,
        last_port: port,
    };
    assert!(register(Asked::Metrics(alone), Arc::downgrade(&source)).is_none());
}

/// Registers a source on a Unix socket in this folder.
fn offer(name: &'static str, folder: &Path) -> (Arc<dyn Source>, Registration) {
    let source: Arc<dyn Source> = Arc::new(Fixed(name));
    let asked = Asked::Top(vec![folder.to_owned()]);
    let registration = register(asked, Arc::downgrade(&source)).expect("it is served");
    (source, registration)
}

fn look(folder: &Folder, request: &str) -> String {
    let [name] = folder.names().unwrap().try_into().expect("one process");
    let mut stream = folder.connect(&name).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn a_process_offers_its_sessions_on_one_socket_until_the_last_is_gone() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("tcpx");
    let (_alice, first) = offer("alice", &path);
    let (_bob, second) = offer("bob", &path);
    let folder = Folder::open(&path).unwrap();
    let answer = look(&folder, "GET /stats HTTP/1.1\r\n\r\n");
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    let process: ProcessStats = serde_json::from_str(body).unwrap();
    assert_eq!(process.pid, std::process::id());
    assert_eq!(process.version, env!("CARGO_PKG_VERSION"));
    let names: Vec<_> = process.sessions.iter().map(|one| &one.stats.name).collect();
    assert_eq!(names, ["alice", "bob"]);
    assert_ne!(process.sessions[0].id, process.sessions[1].id);
    assert!(look(&folder, GET).contains("session=\"bob\""));
    drop(first);
    assert!(!look(&folder, GET).contains("session=\"alice\""));
    drop(second);
    assert!(folder.names().unwrap().is_empty());
}

#[test]
fn scrapers_see_no_document_of_top() {
    let address = free();
    let _served = serve("alice", address);
    let answer = ask(address, "GET /stats HTTP/1.1\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 404 "), "{answer}");
}

#[test]
fn names_of_processes_that_are_gone_are_removed_by_the_next() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("tcpx");
    let folder = Folder::make(std::slice::from_ref(&path)).unwrap();
    drop(folder.listen("1-gone").unwrap());
    let _served = offer("alice", &path);
    // The thread sweeps the folder when it starts: wait for that.
    let deadline = Instant::now() + Duration::from_secs(60);
    while folder.names().unwrap().len() > 1 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
    }
    let left = folder.names().unwrap();
    assert!(!left.contains(&"1-gone.sock".to_owned()), "{left:?}");
    assert_eq!(left.len(), 1);
}

#[test]
fn a_folder_that_cannot_be_made_costs_the_session_nothing() {
    let source: Arc<dyn Source> = Arc::new(Fixed("alice"));
    let nowhere = Asked::Top(vec!["/proc/nobody/tcpx".into()]);
    assert!(register(nowhere, Arc::downgrade(&source)).is_none());
}
