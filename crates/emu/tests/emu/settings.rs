//! Invalid settings stop `init`. (Valid ones are tested where they have an effect.)

use crate::harness::{Plugin, logger, net, warned};

fn refused(text: &str) {
    let plugin = Plugin::load();
    assert_eq!(net!(plugin.v7, init(Some(logger()))), 4);
    assert!(warned(text));
    let mut devices = 0;
    assert_eq!(net!(plugin.v7, devices(&raw mut devices)), 3);
}

isolated! {
    fn a_bad_value(FRAG = "tiny") {
        refused("TCPX_EMU_FRAG=tiny: expected full, short or odd");
    }
}

isolated! {
    fn a_number_out_of_range(NSOCKS = "9") {
        refused("TCPX_EMU_NSOCKS=9: expected 1 to 8");
    }
}

isolated! {
    fn an_unknown_variable(FRAGMENTS = "odd") {
        refused("TCPX_EMU_FRAGMENTS: there is no such setting");
    }
}

isolated! {
    fn a_missing_driver(DEVMEM = "cuda") {
        let plugin = Plugin::load();
        // With a driver it works; without one it is an error instead of an exit.
        match net!(plugin.v7, init(Some(logger()))) {
            0 => {}
            code => assert!((code == 3 || code == 1) && warned("TCPX_EMU_DEVMEM=host") || warned("CUDA")),
        }
    }
}
