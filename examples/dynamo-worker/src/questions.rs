//! The port at which decode workers claim requests. Several threads answer connections, so that a silent connection
//! delays no other.

use std::io::{Error, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long the prefill worker may take to answer.
pub const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a client may take to send the whole question. It is short, so that clients that wait for a thread are still
/// answered in time.
const ASK_TIMEOUT: Duration = Duration::from_millis(500);
/// Number of threads, and so of connections that are served at the same time.
const THREADS: usize = 32;

/// A question: one byte for its kind, then epoch and lease, little-endian. The answer is one byte.
pub type Question = [u8; 17];

/// Answers questions.
pub trait Answers: Send + Sync + 'static {
    /// The answer to a question.
    fn answer(&self, question: Question) -> bool;
}

/// Answers connections in threads, which end when `who` is dropped. Its `Drop` must call [`wake`].
///
/// # Errors
/// No thread could be started.
pub fn answer_all<A: Answers>(listener: TcpListener, who: &Weak<A>) -> std::io::Result<()> {
    let listener = Arc::new(listener);
    for _ in 0..THREADS {
        let (listener, who) = (Arc::clone(&listener), Weak::clone(who));
        let answer = move || {
            for asks in listener.incoming() {
                let Some(who) = who.upgrade() else { break };
                match asks.map(|asks| answer_one(asks, &*who)) {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::warn!(%error, "a claim could not be answered"),
                    Err(error) => {
                        // Without file descriptors `accept` fails at once, again and again.
                        tracing::warn!(%error, "no connection could be accepted");
                        drop(who);
                        std::thread::sleep(ASK_TIMEOUT);
                    }
                }
            }
        };
        std::thread::Builder::new().name("claims".into()).spawn(answer)?;
    }
    Ok(())
}

/// Wakes all threads with one connection each, so that they notice that `who` was dropped.
pub fn wake(control: &SocketAddr) {
    for _ in 0..THREADS {
        if TcpStream::connect_timeout(control, ASK_TIMEOUT).is_err() {
            break;
        }
    }
}

fn answer_one(mut asks: TcpStream, who: &impl Answers) -> std::io::Result<()> {
    let question = read(&mut asks)?;
    asks.write_all(&[who.answer(question).into()])
}

/// Reads a question. One deadline applies to all of it, regardless of the number of reads.
fn read(asks: &mut TcpStream) -> std::io::Result<Question> {
    let (begun, mut question, mut there) = (Instant::now(), Question::default(), 0);
    while there < question.len() {
        let left = ASK_TIMEOUT.saturating_sub(begun.elapsed());
        if left.is_zero() {
            let why = format!("{there} bytes of a question came in {ASK_TIMEOUT:?}");
            return Err(Error::new(ErrorKind::TimedOut, why));
        }
        asks.set_read_timeout(Some(left))?;
        match asks.read(&mut question[there..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(bytes) => there += bytes,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(question)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers whether a question ends with 1.
    struct Last(SocketAddr);

    impl Drop for Last {
        fn drop(&mut self) {
            wake(&self.0);
        }
    }

    impl Answers for Last {
        fn answer(&self, question: Question) -> bool {
            question.ends_with(&[1])
        }
    }

    fn ask(control: SocketAddr, question: Question) -> u8 {
        let mut stream = TcpStream::connect(control).unwrap();
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).unwrap();
        stream.write_all(&question).unwrap();
        let mut answer = [9];
        stream.read_exact(&mut answer).unwrap();
        answer[0]
    }

    /// Silent connections delay no other connection, even if they are more than the threads.
    #[test]
    fn silent_connections_hold_up_nobody() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let control = listener.local_addr().unwrap();
        let who = Arc::new(Last(control));
        answer_all(listener, &Arc::downgrade(&who)).unwrap();
        for silent in [1, THREADS + 1] {
            let connect = |_| TcpStream::connect(control).unwrap();
            let silent: Vec<_> = (0..silent).map(connect).collect();
            for last in [1, 0] {
                assert_eq!(ask(control, [last; 17]), last);
            }
            drop(silent);
        }
        // The port is free once all threads have ended.
        drop(who);
        let begun = Instant::now();
        while TcpListener::bind(control).is_err() {
            assert!(begun.elapsed() < Duration::from_secs(30), "the threads have not ended");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// A client that sends its question byte by byte has no more time than others.
    #[test]
    fn a_question_has_one_deadline() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut slow = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut asks, _) = listener.accept().unwrap();
        let begun = Instant::now();
        let sends = std::thread::spawn(move || {
            let send = |_| {
                std::thread::sleep(ASK_TIMEOUT / 4);
                slow.write_all(&[1]).is_ok()
            };
            (0..17).all(send)
        });
        let error = read(&mut asks).unwrap_err();
        let kinds = [ErrorKind::TimedOut, ErrorKind::WouldBlock];
        assert!(kinds.contains(&error.kind()), "{error}");
        assert!((ASK_TIMEOUT..ANSWER_TIMEOUT).contains(&begun.elapsed()));
        drop(asks);
        sends.join().unwrap();
    }
}
