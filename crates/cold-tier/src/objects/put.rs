//! Writing of objects.

use bytes::Bytes;
use object_store::path::Path;
use object_store::{ObjectStoreExt, PutPayload};

use super::Objects;
use crate::open;

/// Bytes of an object that one request stores. A store's client gives each request the same time, 30 s by default, and
/// repeats it as a whole; longer objects are stored in parts of this size.
const PART: usize = if cfg!(test) { 4096 } else { 16 << 20 };

impl Objects {
    /// Stores the bytes of an object, in parts if they are many and the store takes parts. Others see all of it or nothing.
    pub(super) async fn put(&self, path: &Path, bytes: Bytes) -> object_store::Result<()> {
        self.make_directory().await?;
        let whole = || self.objects.put(path, PutPayload::from_bytes(bytes.clone()));
        if bytes.len() <= PART {
            return whole().await.map(drop);
        }
        let mut upload = match self.objects.put_multipart(path).await {
            Ok(upload) => upload,
            // A WebDAV store takes no parts.
            Err(object_store::Error::NotImplemented { .. }) => return whole().await.map(drop),
            Err(error) => return Err(error),
        };
        let mut stored = Ok(());
        for start in (0..bytes.len()).step_by(PART) {
            let part = bytes.slice(start..bytes.len().min(start + PART));
            stored = upload.put_part(PutPayload::from_bytes(part)).await;
            if stored.is_err() {
                break;
            }
        }
        if stored.is_ok() {
            stored = upload.complete().await.map(drop);
        }
        if stored.is_err() {
            // If this fails too, or if the call is given up before (`Store::close`), the store keeps the parts until its own
            // rules remove them.
            let _ = upload.abort().await;
        }
        stored
    }

    /// Creates the local directory of the objects again if it was deleted: `object_store` would create it for everybody.
    async fn make_directory(&self) -> object_store::Result<()> {
        let Some(directory) = self.directory.clone() else { return Ok(()) };
        let made = tokio::task::spawn_blocking(move || open::create(&directory)).await?;
        made.map_err(|error| object_store::Error::Generic {
            store: "LocalFileSystem",
            source: error.into(),
        })
    }
}
