//! `tcpx nixl`, with a folder that looks like an installed NIXL.

use std::path::{Path, PathBuf};

use crate::support::{Run, run, tcpx};

const OWN: &str = "NIXL's own UCX";
const BUILD: &str = "tcpx-nixl-backend: this file is TCPX";

struct Site {
    folder: tempfile::TempDir,
    version: &'static str,
}

impl Site {
    fn new(version: &'static str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let site = Site { folder, version };
        std::fs::create_dir_all(site.plugins()).unwrap();
        std::fs::create_dir(site.path().join("nixl_cu12.libs")).unwrap();
        std::fs::write(site.ucx(), OWN).unwrap();
        std::fs::write(site.build(), BUILD).unwrap();
        site
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn build(&self) -> PathBuf {
        self.path().join("built.so")
    }

    fn plugins(&self) -> PathBuf {
        self.path().join(".nixl_cu12.mesonpy.libs/plugins")
    }

    fn ucx(&self) -> PathBuf {
        self.plugins().join("libplugin_UCX.so")
    }

    fn nixl(&self, args: &[&str]) -> Run {
        let found = format!("nixl_cu12\t{}\t{}", self.version, self.path().display());
        let plugin = self.build();
        let mut command = tcpx(&["nixl"]);
        command
            .args(args)
            .args(["--found", &found, "--plugin", plugin.to_str().unwrap()])
            .env("XDG_CACHE_HOME", self.path().join("cache"));
        command.output().unwrap().into()
    }
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn a_stand_in_cannot_be_missed_and_is_undone() {
    let site = Site::new("1.5.1");
    site.nixl(&["status"]).expect(1);
    for _ in 0..2 {
        let said = site.nixl(&["install", "--as", "ucx"]).expect(0).stdout;
        assert!(said.contains("UCX IS TCPX"), "{said}");
        assert_eq!(read(site.ucx()), BUILD);
    }
    assert!(
        site.nixl(&["status"])
            .expect(0)
            .stdout
            .contains("UCX IS TCPX")
    );
    let row = site.nixl(&["status", "--json"]).expect(0).json()["nixl"][0].clone();
    assert_eq!(row["stands_in_for"], "UCX");
    assert_eq!(read(row["kept"].as_str().unwrap()), OWN);

    let said = site.nixl(&["uninstall"]).expect(0).stdout;
    assert!(
        said.contains("removed") && !said.contains("UCX IS"),
        "{said}"
    );
    assert_eq!(read(site.ucx()), OWN);
    assert_eq!(std::fs::read_dir(site.plugins()).unwrap().count(), 1);
    let said = site.nixl(&["uninstall"]).expect(0).stdout;
    assert!(said.contains("was not installed"), "{said}");
}

#[test]
fn an_upgrade_of_nixl_is_noticed_and_kept() {
    let site = Site::new("1.5.1");
    site.nixl(&["install", "--as", "UCX"]).expect(0);
    std::fs::write(site.ucx(), "newer").unwrap();
    let said = site.nixl(&["status"]).expect(0).stdout;
    assert!(said.contains("NIXL's own again"), "{said}");
    site.nixl(&["uninstall"]).expect(0);
    assert_eq!(read(site.ucx()), "newer");
}

#[test]
fn a_nixl_that_is_not_supported_is_left_alone() {
    for (version, remedy) in [("0.8.0", "pip install"), ("99.0.0", "--untested")] {
        let site = Site::new(version);
        for action in ["install", "path"] {
            let said = site.nixl(&[action]).expect(1).stderr;
            assert!(said.contains(version) && said.contains(remedy), "{said}");
        }
        assert_eq!(std::fs::read_dir(site.plugins()).unwrap().count(), 1);
    }
    let newer = Site::new("99.0.0");
    newer.nixl(&["install", "--untested"]).expect(0);
}

#[test]
fn the_folder_has_nixls_own_plugins() {
    let site = Site::new("1.5.1");
    let folder = |args: &[&str]| PathBuf::from(site.nixl(args).expect(0).stdout.trim());
    let plain = folder(&["path"]);
    assert_eq!(read(plain.join("libplugin_TCPX.so")), BUILD);
    assert_eq!(read(plain.join("libplugin_UCX.so")), OWN);
    let as_ucx = folder(&["path", "--as", "UCX"]);
    assert_eq!(read(as_ucx.join("libplugin_UCX.so")), BUILD);
    assert_eq!(read(plain.join("libplugin_UCX.so")), OWN);
}

#[test]
fn a_file_that_is_not_the_backend_cannot_stand_in() {
    let site = Site::new("1.5.1");
    std::fs::write(site.build(), "something else").unwrap();
    let said = site.nixl(&["install", "--as", "UCX"]).expect(1).stderr;
    assert!(
        said.contains("built.so") && said.contains("not the TCPX"),
        "{said}"
    );
    assert_eq!(read(site.ucx()), OWN);
    assert_eq!(std::fs::read_dir(site.plugins()).unwrap().count(), 1);
}

#[test]
fn only_ucx_can_be_stood_in_for() {
    let said = run(&["nixl", "install", "--as", "POSIX"]).expect(2).stderr;
    assert!(said.contains("POSIX") && said.contains("UCX"), "{said}");
}
