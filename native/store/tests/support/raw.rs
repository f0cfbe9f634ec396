//! Servers that know nothing of S3: one that shows what it was sent, and a proxy.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// An object has been stored.
pub(crate) const STORED: &str = "HTTP/1.1 200 OK\r\nETag: \"tag\"\r\nContent-Length: 0\r\n\r\n";

/// An answer with an error document.
pub(crate) fn refusal(status: u16, document: &str) -> String {
    let len = document.len();
    format!(
        "HTTP/1.1 {status} Odd\r\nContent-Type: application/xml\r\nContent-Length: {len}\r\n\r\n{document}"
    )
}

/// The head of a request in lower case, and its body.
pub(crate) struct Seen {
    pub(crate) head: String,
    pub(crate) body: Vec<u8>,
}

impl Seen {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name}: ")))
    }
}

/// Answers one request with `answer` and gives what it saw.
pub(crate) async fn server(answer: impl Into<String>) -> (String, tokio::task::JoinHandle<Seen>) {
    let answer = answer.into();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let endpoint = format!("http://{}", listener.local_addr().expect("an address"));
    let seen = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a connection");
        let mut read = Vec::new();
        loop {
            let mut buffer = vec![0; 65_536];
            let len = stream.read(&mut buffer).await.expect("bytes");
            read.extend_from_slice(&buffer[..len]);
            let Some(end) = read.windows(4).position(|window| window == b"\r\n\r\n") else {
                continue;
            };
            let head = String::from_utf8(read[..end].to_vec()).expect("text");
            let head: Vec<String> = head
                .lines()
                .map(|line| match line.split_once(": ") {
                    Some((name, value)) => format!("{}: {value}", name.to_lowercase()),
                    None => line.to_owned(),
                })
                .collect();
            let mut seen = Seen {
                head: head.join("\n"),
                body: read[end + 4..].to_vec(),
            };
            let len: usize = seen
                .header("content-length")
                .map_or(0, |len| len.parse().expect("a number"));
            while seen.body.len() < len {
                let read = stream.read(&mut buffer).await.expect("bytes");
                assert!(read > 0, "the body is cut off");
                seen.body.extend_from_slice(&buffer[..read]);
            }
            stream.write_all(answer.as_bytes()).await.expect("sent");
            return seen;
        }
    });
    (endpoint, seen)
}

/// A proxy that sends everything to one place, whatever host is asked for.
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    heads: Arc<Mutex<Vec<String>>>,
}

impl Proxy {
    /// Without `target` it answers each request itself, as one that wants a password.
    pub(crate) async fn start(target: Option<SocketAddr>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let heads = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&heads);
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.expect("a connection");
                tokio::spawn(pass_on(stream, target, Arc::clone(&seen)));
            }
        });
        Self { address, heads }
    }

    /// The heads with which connections began, in the order in which they came.
    pub(crate) fn heads(&self) -> Vec<String> {
        self.heads.lock().expect("no panic").clone()
    }
}

async fn pass_on(
    mut client: TcpStream,
    target: Option<SocketAddr>,
    heads: Arc<Mutex<Vec<String>>>,
) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match client.read_u8().await {
            Ok(byte) => head.push(byte),
            Err(_) => return,
        }
    }
    let text = String::from_utf8(head).expect("text");
    heads.lock().expect("no panic").push(text.clone());
    let Some(target) = target else {
        let answer = "HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
        client.write_all(answer.as_bytes()).await.expect("sent");
        return;
    };
    let mut server = TcpStream::connect(target)
        .await
        .expect("the target listens");
    if text.starts_with("CONNECT ") {
        let answer = "HTTP/1.1 200 Connection established\r\n\r\n";
        client.write_all(answer.as_bytes()).await.expect("sent");
    } else {
        server.write_all(text.as_bytes()).await.expect("sent");
    }
    // Either end may go away at any time.
    let _ended = tokio::io::copy_bidirectional(&mut client, &mut server).await;
}
