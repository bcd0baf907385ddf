//! A store in memory that asks before each call what it shall answer.

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMultipartOptions, PutOptions, PutPayload, PutResult, Result, UploadPart,
};

use super::*;
use crate::open::Opened;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Call {
    Get,
    /// The size of an object.
    Head,
    Put,
    /// The beginning of an object that is stored in parts.
    Begin,
    Part,
    Complete,
    Abort,
}

type Answer = Arc<dyn Fn(Call) -> Result<()> + Send + Sync>;

/// The error of a hook whose call never ends.
pub(super) fn never() -> object_store::Error {
    object_store::Error::NotSupported { source: "it never ends".into() }
}

pub(super) fn fails() -> object_store::Error {
    object_store::Error::Generic { store: "the test's", source: "it is down".into() }
}

/// The answer of a hook, which does not come at once, or never.
async fn ask(answer: &Answer, call: Call) -> Result<()> {
    let answered = answer(call);
    if matches!(answered, Err(object_store::Error::NotSupported { .. })) {
        std::future::pending::<()>().await;
    }
    tokio::task::yield_now().await;
    answered
}

/// A store in memory that calls a hook before each operation, except when it lists its objects.
#[derive(Clone)]
struct Asking {
    objects: Arc<InMemory>,
    answer: Answer,
    /// Number of objects after which the list does not go on; `None` for a whole list.
    listed: Option<usize>,
}

impl std::fmt::Debug for Asking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Asking")
    }
}

impl std::fmt::Display for Asking {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Asking")
    }
}

/// An object that is stored in parts.
struct AskingUpload {
    parts: Box<dyn MultipartUpload>,
    answer: Answer,
}

impl std::fmt::Debug for AskingUpload {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("AskingUpload")
    }
}

impl MultipartUpload for AskingUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        let (answer, part) = (Arc::clone(&self.answer), self.parts.put_part(data));
        Box::pin(async move {
            ask(&answer, Call::Part).await?;
            part.await
        })
    }

    fn complete<'s, 'f>(&'s mut self) -> BoxFuture<'f, Result<PutResult>>
    where
        's: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            ask(&self.answer, Call::Complete).await?;
            self.parts.complete().await
        })
    }

    fn abort<'s, 'f>(&'s mut self) -> BoxFuture<'f, Result<()>>
    where
        's: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            ask(&self.answer, Call::Abort).await?;
            self.parts.abort().await
        })
    }
}

impl ObjectStore for Asking {
    fn put_opts<'s, 'l, 'f>(
        &'s self,
        location: &'l Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> BoxFuture<'f, Result<PutResult>>
    where
        's: 'f,
        'l: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            ask(&self.answer, Call::Put).await?;
            self.objects.put_opts(location, payload, options).await
        })
    }

    fn put_multipart_opts<'s, 'l, 'f>(
        &'s self,
        location: &'l Path,
        options: PutMultipartOptions,
    ) -> BoxFuture<'f, Result<Box<dyn MultipartUpload>>>
    where
        's: 'f,
        'l: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            ask(&self.answer, Call::Begin).await?;
            let parts = self.objects.put_multipart_opts(location, options).await?;
            Ok(Box::new(AskingUpload { parts, answer: Arc::clone(&self.answer) }) as _)
        })
    }

    fn get_opts<'s, 'l, 'f>(
        &'s self,
        location: &'l Path,
        options: GetOptions,
    ) -> BoxFuture<'f, Result<GetResult>>
    where
        's: 'f,
        'l: 'f,
        Self: 'f,
    {
        Box::pin(async move {
            ask(&self.answer, if options.head { Call::Head } else { Call::Get }).await?;
            self.objects.get_opts(location, options).await
        })
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.objects.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let all = self.objects.list(prefix);
        match self.listed {
            None => all,
            Some(listed) => all.take(listed).chain(stream::pending()).boxed(),
        }
    }

    fn list_with_delimiter<'s, 'p, 'f>(
        &'s self,
        prefix: Option<&'p Path>,
    ) -> BoxFuture<'f, Result<ListResult>>
    where
        's: 'f,
        'p: 'f,
        Self: 'f,
    {
        self.objects.list_with_delimiter(prefix)
    }

    fn copy_opts<'s, 'a, 'b, 'f>(
        &'s self,
        from: &'a Path,
        to: &'b Path,
        options: CopyOptions,
    ) -> BoxFuture<'f, Result<()>>
    where
        's: 'f,
        'a: 'f,
        'b: 'f,
        Self: 'f,
    {
        self.objects.copy_opts(from, to, options)
    }
}

/// A tier below a cache, over these objects, of which it knows only the names.
pub(super) fn below(
    fed: &mut Fed<Null>,
    objects: &Arc<InMemory>,
    answer: impl Fn(Call) -> Result<()> + Send + Sync + 'static,
) -> ColdTier<Null> {
    let store = Asking { objects: Arc::clone(objects), answer: Arc::new(answer), listed: None };
    open(fed, store, Duration::ZERO).unwrap()
}

/// A tier over these objects, whose list does not go on after so many of them. The store takes so long to open.
pub(super) fn listing(
    fed: &mut Fed<Null>,
    objects: &Arc<InMemory>,
    (listed, takes): (usize, Duration),
) -> std::result::Result<ColdTier<Null>, ColdError> {
    let (objects, listed) = (Arc::clone(objects), Some(listed));
    open(fed, Asking { objects, answer: Arc::new(|_| Ok(())), listed }, takes)
}

fn open(
    fed: &mut Fed<Null>,
    store: Asking,
    takes: Duration,
) -> std::result::Result<ColdTier<Null>, ColdError> {
    let (block_bytes, checkpoint_bytes) = fed.manager.host_image_bytes().unwrap();
    let owner = Owner { identity: b"weights"[..].into(), block_bytes, checkpoint_bytes };
    let opened = Opened { objects: Box::new(store), prefix: Path::default(), directory: None };
    let slowly = move || {
        std::thread::sleep(takes);
        Ok(opened)
    };
    ColdTier::over(&mut fed.manager, slowly, owner)
}
