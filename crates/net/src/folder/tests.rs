use std::io::{Read, Write};
use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::span::Cursor;

fn folder(base: &Path) -> Folder {
    Folder::make(&[base.join("sockets")]).unwrap()
}

#[test]
fn a_socket_is_found_by_its_name_and_answers() {
    let base = tempfile::tempdir().unwrap();
    let folder = folder(base.path());
    let (listener, name) = folder.listen("7-a").unwrap();
    assert_eq!(folder.names().unwrap(), ["7-a.sock"]);
    let mut near = folder.connect(&name).unwrap();
    let far = listener.accept_own().unwrap();
    far.send(b"here", &[], Cursor::default()).unwrap();
    far.shutdown();
    let mut text = String::new();
    near.read_to_string(&mut text).unwrap();
    assert_eq!(text, "here");
    near.write_all(b"x").unwrap_err();
    folder.remove(&name);
    assert!(folder.names().unwrap().is_empty());
}

#[test]
fn only_names_of_processes_that_are_gone_are_swept() {
    let base = tempfile::tempdir().unwrap();
    let folder = folder(base.path());
    let _living = folder.listen("1-living").unwrap();
    drop(folder.listen("2-gone").unwrap());
    let path = folder.path().to_owned();
    // One socket is being made right now, the other was left by a process that crashed while making
    // it.
    let (_young, _old) = (bound(&path, ".3.sock"), bound(&path, ".4.sock"));
    let mut touch = std::process::Command::new("touch");
    let touched = touch.args(["-d", "1 hour ago"]).arg(path.join(".4.sock"));
    assert!(touched.status().unwrap().success());
    std::fs::write(path.join("notes.sock"), "no socket").unwrap();
    folder.sweep().unwrap();
    let mut left: Vec<_> = std::fs::read_dir(&path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    left.sort();
    assert_eq!(left, [".3.sock", "1-living.sock", "notes.sock"]);
    assert_eq!(folder.names().unwrap(), ["1-living.sock"]);
}

fn bound(folder: &Path, name: &str) -> std::os::unix::net::UnixListener {
    std::os::unix::net::UnixListener::bind(folder.join(name)).unwrap()
}

#[test]
fn a_folder_that_others_can_enter_or_that_is_a_link_is_refused() {
    let base = tempfile::tempdir().unwrap();
    let path = base.path().join("sockets");
    drop(folder(base.path()));
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    for mode in [0o750, 0o701, 0o770] {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let error = Folder::make(std::slice::from_ref(&path)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied, "{mode:o}");
    }
    std::fs::set_permissions(&path, PermissionsExt::from_mode(0o700)).unwrap();
    let link = base.path().join("link");
    symlink(&path, &link).unwrap();
    assert!(Folder::make(&[link]).is_err());
    let file = base.path().join("file");
    std::fs::write(&file, "").unwrap();
    assert!(Folder::make(std::slice::from_ref(&file)).is_err());
    // The next place is used if one cannot be.
    let second = Folder::make(&[file, path.clone()]).unwrap();
    assert_eq!(second.path(), path);
}

#[test]
fn services_and_logins_have_their_places() {
    let user = Uid::from_raw(7);
    let expected = ["/run/user/7/x", "/tmp/x-7"].map(PathBuf::from);
    assert_eq!(places("x", None, user), expected);
    assert_eq!(places("x", Some("/run/user/7".into()), user), expected);
    let own = places("x", Some("/home/me/run".into()), user);
    assert_eq!(own[0], Path::new("/home/me/run/x"));
    assert_eq!(own[1..], expected);
}
