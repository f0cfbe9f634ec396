//! The program as a script sees it: how it starts, how it is controlled, how it ends.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

struct Server {
    child: Child,
    dir: TempDir,
    /// Host and port.
    address: String,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        let dir = TempDir::new().expect("a folder");
        let mut child = Command::new(env!("CARGO_BIN_EXE_s3local"))
            .arg("--dir")
            .arg(dir.path().join("data"))
            .arg("--ready-file")
            .arg(dir.path().join("ready"))
            .args(["--bucket", "bucket"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("its output"))
            .read_line(&mut line)
            .expect("a line");
        let address = line
            .trim_end()
            .strip_prefix("s3local: listening on http://")
            .expect("the endpoint")
            .to_owned();
        Self {
            child,
            dir,
            address,
        }
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill")
            .arg(format!("-{name}"))
            .arg(self.child.id().to_string())
            .status();
        assert!(sent.expect("it runs").success());
    }

    /// A request on a connection of its own, and the whole answer.
    fn request(&self, method: &str, path: &str, body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).expect("a connection");
        let len = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: {len}\r\n\r\n{body}",
            self.address
        )
        .expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended already.
        if self.child.kill().is_ok() {
            self.child.wait().expect("it ended");
        }
    }
}

#[test]
fn it_says_where_it_is_and_ends_on_a_signal() {
    for signal in ["TERM", "INT"] {
        let mut server = Server::start(&[]);
        let ready =
            std::fs::read_to_string(server.dir.path().join("ready")).expect("the file is there");
        assert_eq!(ready, format!("http://{}\n", server.address));
        assert!(server.dir.path().join("data/bucket").is_dir());
        server.signal(signal);
        assert!(server.child.wait().expect("it ends").success());
    }
}

#[test]
fn it_ends_with_its_standard_input_where_it_is_told_to() {
    let mut server = Server::start(&["--exit-on-stdin-eof"]);
    assert!(
        server
            .request("GET", "/-/health", "")
            .starts_with("HTTP/1.1 200 ")
    );
    drop(server.child.stdin.take());
    assert!(server.child.wait().expect("it ends").success());
}

#[test]
fn it_refuses_what_it_cannot_use() {
    let dir = TempDir::new().expect("a folder");
    let file = dir.path().join("file");
    std::fs::write(&file, "").expect("written");
    let run = |arguments: &[&std::ffi::OsStr]| {
        let ended = Command::new(env!("CARGO_BIN_EXE_s3local"))
            .args(arguments)
            .output()
            .expect("it runs");
        assert!(!ended.status.success());
        String::from_utf8(ended.stderr).expect("text")
    };
    let said = run(&["--dir".as_ref(), file.as_ref()]);
    assert!(said.contains("cannot use the folder"), "{said}");
    let said = run(&[
        "--dir".as_ref(),
        dir.path().as_ref(),
        "--bucket".as_ref(),
        "No_Name".as_ref(),
    ]);
    assert!(said.contains("No_Name"), "{said}");
}

#[test]
fn it_is_controlled_over_http() {
    let server = Server::start(&[]);
    let added = server.request(
        "POST",
        "/-/faults",
        r#"[{"op": "get", "do": "status", "status": 503, "code": "SlowDown"}]"#,
    );
    assert!(added.ends_with("{\"ids\":[1]}\n"), "{added}");
    let answer = server.request("GET", "/bucket/key", "");
    assert!(
        answer.starts_with("HTTP/1.1 503 ") && answer.contains("<Code>SlowDown</Code>"),
        "{answer}"
    );
    let rules = server.request("GET", "/-/faults", "");
    assert!(
        rules.contains(r#""id":1"#) && rules.contains(r#""do":"status""#),
        "{rules}"
    );
    assert!(
        server
            .request("DELETE", "/-/faults/1", "")
            .starts_with("HTTP/1.1 204 ")
    );
    assert!(
        server
            .request("DELETE", "/-/faults/1", "")
            .starts_with("HTTP/1.1 404 ")
    );
    // Without a signature.
    assert!(
        server
            .request("GET", "/bucket/key", "")
            .starts_with("HTTP/1.1 403 ")
    );
    let counters = server.request("GET", "/-/counters", "");
    let expected = r#""get":{"requests":2,"succeeded":0,"failed":2,"in_flight":0,"faults":1,"#;
    assert!(counters.contains(expected), "{counters}");
    for wrong in [
        "{",
        r#"{"do": "explode"}"#,
        r#"{"do": "status", "status": 200}"#,
        r#"{"do": "stall", "probability": 2}"#,
        r#"{"do": "slow", "bytes_per_sec": 0}"#,
    ] {
        assert!(
            server
                .request("POST", "/-/faults", wrong)
                .starts_with("HTTP/1.1 400 "),
            "{wrong}"
        );
    }
    assert!(
        server
            .request("GET", "/-/nothing", "")
            .starts_with("HTTP/1.1 404 ")
    );
}

#[test]
fn requests_wait_while_it_is_paused() {
    let server = Server::start(&[]);
    assert!(
        server
            .request("POST", "/-/pause", "")
            .starts_with("HTTP/1.1 204 ")
    );
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| server.request("GET", "/bucket/key", ""));
        // It has come in, and is held.
        while !server
            .request("GET", "/-/counters", "")
            .contains(r#""in_flight":1"#)
        {
            std::thread::yield_now();
        }
        assert!(!waiting.is_finished());
        assert!(
            server
                .request("POST", "/-/resume", "")
                .starts_with("HTTP/1.1 204 ")
        );
        assert!(
            waiting
                .join()
                .expect("no panic")
                .starts_with("HTTP/1.1 403 ")
        );
    });
}
