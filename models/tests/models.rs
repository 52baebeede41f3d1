//! Runs each model under every interleaving.

macro_rules! models {
    ($($name:ident,)+) => {
        $(#[test]
        fn $name() {
            tcpx_models::$name();
        })+
    };
}

models!(
    a_call_wakes_a_worker_that_goes_to_sleep,
    a_chunk_given_back_is_settled_once,
    a_gate_opens_only_when_it_is_empty,
    a_paused_lane_is_resumed,
    calls_of_two_threads_both_arrive,
    nobody_is_inside_a_closed_gate,
    one_call_concludes_a_run,
);
