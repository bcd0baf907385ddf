//! The ports at which a publisher listens. They stay open while its subscribers are disconnected, so that no other
//! process can take them, and subscribers can connect again at once.

use std::io;
use std::net::{Ipv4Addr, TcpListener};

use zeromq::{Endpoint, Host, PubSocket, RouterSocket, Socket, ZmqError};

use crate::options::{PublishError, PublisherOptions};

/// The listening sockets of a publisher.
pub(crate) struct Listeners {
    publish: TcpListener,
    pub replay: TcpListener,
    /// The endpoints for subscribers and for replays, with their actual ports.
    pub endpoints: [String; 2],
}

impl Listeners {
    /// Listens at the endpoints of the options.
    pub fn bind(options: &PublisherOptions) -> Result<Self, PublishError> {
        let (publish, endpoint) = bind(&options.endpoint)?;
        let (replay, replay_endpoint) = bind(&options.replay_endpoint)?;
        Ok(Self { publish, replay, endpoints: [endpoint, replay_endpoint] })
    }

    /// Sockets that accept connections in the current runtime. The ports stay open when they are dropped.
    pub async fn sockets(&self) -> io::Result<(PubSocket, RouterSocket)> {
        let failed = |error: ZmqError| match error {
            ZmqError::Network(error) => error,
            error => io::Error::other(error.to_string()),
        };
        let (mut publish, mut replay) = (PubSocket::new(), RouterSocket::new());
        publish.bind_listener(self.publish.try_clone()?).await.map_err(failed)?;
        replay.bind_listener(self.replay.try_clone()?).await.map_err(failed)?;
        Ok((publish, replay))
    }
}

/// Listens, and returns the endpoint with its actual port. The host `*` is every IPv4 address, as in ZeroMQ's own library.
fn bind(endpoint: &str) -> Result<(TcpListener, String), PublishError> {
    let refused = |reason| PublishError::Bind { endpoint: endpoint.to_owned(), reason };
    let Ok(Endpoint::Tcp(host, port)) = endpoint.parse::<Endpoint>() else {
        return Err(refused("it is not tcp://HOST:PORT".to_owned()));
    };
    let host = match host {
        Host::Domain(name) if name == "*" => Host::Ipv4(Ipv4Addr::UNSPECIFIED),
        host => host,
    };
    let bound = TcpListener::bind((host.to_string().as_str(), port))
        .and_then(|listener| Ok((listener.local_addr()?.port(), listener)));
    let (port, listener) = bound.map_err(|error| refused(error.to_string()))?;
    Ok((listener, Endpoint::Tcp(host, port).to_string()))
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Builder;
    use zeromq::SubSocket;

    use super::*;

    /// vLLM's default endpoint is `tcp://*:5557`.
    #[test]
    fn a_star_is_every_address() {
        let (listener, endpoint) = bind("tcp://*:0").unwrap();
        let address = listener.local_addr().unwrap();
        assert!(address.ip().is_unspecified() && address.is_ipv4(), "{address}");
        assert_eq!(endpoint, format!("tcp://0.0.0.0:{}", address.port()));
        std::net::TcpStream::connect(("127.0.0.1", address.port())).unwrap();
    }

    /// After the sockets of zeromq were dropped, nobody else can take the ports, and new sockets accept connections.
    #[test]
    fn ports_stay_open_without_sockets() {
        let any_port = "tcp://127.0.0.1:0".to_owned();
        let options = PublisherOptions {
            endpoint: any_port.clone(),
            replay_endpoint: any_port,
            ..PublisherOptions::default()
        };
        let listeners = Listeners::bind(&options).unwrap();
        for _ in 0..2 {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let _sockets = listeners.sockets().await.unwrap();
                SubSocket::new().connect(&listeners.endpoints[0]).await.unwrap();
            });
            drop(runtime);
            for endpoint in &listeners.endpoints {
                let taken = bind(endpoint);
                assert!(matches!(taken, Err(PublishError::Bind { .. })), "{taken:?}");
            }
        }
    }
}
