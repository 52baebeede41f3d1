use tcpx_net::Listener;

use super::*;
use crate::Config;
use crate::driver::addresses::socket_options;
use crate::testing::session;

#[test]
fn lane_prefers_routes_that_have_not_failed() {
    assert_eq!(choose_route(4, None, &[0], &[0]), Some(1));
    assert_eq!(choose_route(4, None, &[0], &[0, 1, 2]), Some(3));
    // A route that has reached the peer comes first, unless it has failed for this lane.
    assert_eq!(choose_route(4, Some(2), &[0], &[0]), Some(2));
    assert_eq!(choose_route(4, Some(2), &[2], &[2]), Some(0));
    // If all routes have failed for some lane,
    // each lane still tries the routes that it has not tried.
    assert_eq!(choose_route(2, None, &[1], &[0, 1]), Some(0));
    assert_eq!(choose_route(2, None, &[0, 1], &[0, 1]), None);
}

#[test]
fn pauses_double_and_are_short_in_sum() {
    for drops in 0..MAX_DROPS {
        let (least, pause) = (FIRST_PAUSE * (1 << drops), pause_after(drops));
        assert!(least <= pause && pause < least * 3 / 2, "{pause:?}");
    }
    let longest: Duration = (0..MAX_DROPS).map(|d| FIRST_PAUSE * (1 << d) * 3 / 2).sum();
    assert!(longest < Duration::from_secs(1), "{longest:?}");
}

#[test]
fn a_syn_that_is_not_answered_is_sent_again_a_few_times() {
    let now = Instant::now();
    let end = now + Duration::from_secs(3);
    let mut lane = DialLane {
        route: 0,
        tried: Vec::new(),
        drops: 0,
        syns: 0,
        route_until: Some(end),
        token: 0,
        deadline: end,
        state: LaneState::Idle,
    };
    lane.be_patient(now);
    assert_eq!(lane.deadline, now + PATIENCE);
    // Never beyond the end of the route's time.
    let late = end - PATIENCE / 2;
    lane.be_patient(late);
    assert_eq!(lane.deadline, end);
    lane.syns = MAX_SYNS;
    lane.be_patient(now);
    assert_eq!(lane.deadline, end);
}

#[test]
fn routes_share_the_connect_timeout() {
    let (short, usual, long) = [1, 10, 30].map(Duration::from_secs).into();
    assert_eq!(route_time(usual, 1), usual);
    assert_eq!(route_time(long, 1), long);
    assert_eq!(route_time(usual, 2), MAX_ROUTE_TIME);
    assert_eq!(route_time(usual, 4), usual / 4);
    assert_eq!(route_time(usual, 9), usual / 4);
    assert_eq!(route_time(long, 4), MAX_ROUTE_TIME);
    assert_eq!(route_time(short, 4), MIN_ROUTE_TIME);
}

/// Makes an attempt with one lane and two routes, whose SYN on the first is not answered.
fn unanswered(now: Instant) -> Attempt {
    let (alice, bob) = (session("alice"), session("bob"));
    let info = ConnectionInfo::decode(&bob.connection_info()).unwrap();
    let core = alice.core();
    let peer = PeerShared::new("bob", info.id(), core.context(), Arc::downgrade(core));
    let route = |host| Route {
        local: None,
        remote: ([127, 0, 0, host], 9).into(),
    };
    let routes = Routes {
        all: vec![route(1), route(2)],
        preferred: 1,
    };
    let limit = Duration::from_secs(10);
    let mut attempt = Attempt::new(peer, info, 1, routes, 1, limit);
    attempt.connecting(0, stream(), 7, now);
    attempt
}

fn stream() -> Stream {
    let options = socket_options(&Config::defaults());
    let any = Listener::bind(([127, 0, 0, 1], 0).into(), &options).unwrap();
    Stream::connect(any.local_addr().unwrap(), None, &options).unwrap()
}

#[test]
fn another_route_is_tried_beside_one_that_does_not_answer() {
    let now = Instant::now();
    let mut attempt = unanswered(now);
    for expected in [0, 0, 1, 0] {
        let route = attempt.next_syn(0, now);
        assert_eq!(route, Some(expected));
        assert_eq!(attempt.route(0), attempt.way(0));
        attempt.sent_syn(0, expected, Ok(stream()), now);
    }
    // All of this happens long before the end of the route's time.
    let LaneState::Connecting(syns) = &attempt.lanes[0].state else {
        panic!("SYNs are on their way");
    };
    let routes: Vec<_> = syns.iter().map(|syn| syn.route).collect();
    assert_eq!(routes, [0, 1, 0]);
    assert_eq!(attempt.next_syn(0, now + MAX_ROUTE_TIME), None);
    // A route that fails at once is not tried again; the lane's own route continues.
    let mut attempt = unanswered(now);
    attempt.lanes[0].syns = SYNS_ALONE;
    attempt.sent_syn(
        0,
        1,
        Err(std::io::ErrorKind::NetworkUnreachable.into()),
        now,
    );
    assert_eq!(attempt.next_syn(0, now), Some(0));
    assert_eq!(attempt.failures.len(), 1);
}

#[test]
fn handshake_has_less_time_if_another_route_works() {
    let now = Instant::now();
    let mut attempt = unanswered(now);
    attempt.hurry(0, now);
    assert_eq!(attempt.lanes[0].deadline, now + attempt.route_time);
    attempt.good = Some(1);
    attempt.hurry(0, now);
    assert_eq!(attempt.lanes[0].deadline, now + HANDSHAKE_BESIDE);
}
