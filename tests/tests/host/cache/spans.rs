//! The spans and events that a `tracing` subscriber sees of a cache are exactly those of the table in the docs.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex};

use dsv4_kv::device::{EmuDevice, EmuOptions};
use dsv4_kv::{Accepted, KvError, Launches, StepRequest};
use dsv4_kv_tests::fed::{Padding, Part, begin};
use dsv4_kv_tests::stories::Story;
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use super::tier::{LAYERS, TOKENS, lost, prompt, run, tokens};

/// Rows `name | kind | fields` of all spans and events, and the spans that were open when one came.
#[derive(Clone, Default)]
struct Seen {
    rows: Arc<Mutex<BTreeSet<String>>>,
    nested: Arc<Mutex<BTreeSet<(String, String)>>>,
}

impl Seen {
    fn note(&self, metadata: &Metadata<'_>, parent: Option<&str>) {
        assert_eq!(metadata.target(), "dsv4_kv", "{metadata:?}");
        let kind = if metadata.is_span() { "span" } else { "event" };
        let fields = metadata.fields().iter().map(|field| field.name());
        let fields: Vec<_> = fields.filter(|&name| name != "message").collect();
        let name = metadata.name();
        self.rows.lock().unwrap().insert(format!("{name} | {kind} | {}", fields.join(", ")));
        let parent = parent.unwrap_or("").to_owned();
        self.nested.lock().unwrap().insert((name.to_owned(), parent));
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Seen {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let parent = context.span(id).and_then(|span| span.parent()).map(|parent| parent.name());
        self.note(attributes.metadata(), parent);
    }

    fn on_record(&self, _: &Id, values: &Record<'_>, _: Context<'_, S>) {
        assert!(!values.is_empty(), "a field that the span does not have");
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let parent = context.event_span(event).map(|span| span.name());
        self.note(event.metadata(), parent);
    }
}

/// The spans and events in the table of the docs, in the form of [`Seen::rows`].
fn documented() -> BTreeSet<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/metrics.md");
    let page = fs::read_to_string(path).expect("it is committed");
    let row = |line: &str| {
        let cells: Vec<_> = line.split('|').map(|cell| cell.trim().replace('`', "")).collect();
        let [_, name, kind, fields, ..] = &cells[..] else { return None };
        ["span", "event"].contains(&kind.as_str()).then(|| format!("{name} | {kind} | {fields}"))
    };
    page.lines().filter_map(row).collect()
}

/// Runs admissions, steps of both kinds, a step that is dropped, one that is refused, and a prefix that returns from
/// host memory.
fn story() -> Result<(), KvError> {
    let device = EmuDevice::new(EmuOptions::default());
    let [story, other] = [471, 472].map(|seed| Story::random(&LAYERS, TOKENS + 1, seed));
    let mut fed = lost(&device, [&story, &other]);
    let tokens = tokens();
    let admission = fed.manager.admit_waiting(&fed.stream, &prompt(&tokens, b"a"))?;
    assert_eq!(admission.reused, 256);
    run(&mut fed, admission.id, &story, 256);
    let parts = [Part::new(admission.id, &story, TOKENS..TOKENS + 1)];
    fed.inputs.load(&fed.stream, &parts, 1);
    drop(begin(&mut fed.manager, &fed.stream, &parts, Padding::None)?);
    for mut step in begin(&mut fed.manager, &fed.stream, &parts, Padding::None)? {
        fed.inputs.run(&mut step, &mut |_, _| Ok(()))?;
        step.commit(&[Accepted::count(admission.id, 1)])?;
    }
    let wrong = [StepRequest { id: admission.id, start: 0, tokens: 1 }];
    assert!(fed.manager.begin_step(&fed.stream, Launches::Eager, &wrong).is_err());
    Ok(())
}

#[test]
fn the_table_of_the_docs_has_all_spans_and_no_others() {
    let seen = Seen::default();
    // With one subscriber, `tracing` asks only the default subscriber of the thread that enters a span first, and keeps
    // the answer for all threads. That thread may be another test's, which has none. With two subscribers it asks both.
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    let subscriber = tracing_subscriber::registry().with(seen.clone());
    tracing::subscriber::with_default(subscriber, story).expect("no step is refused");
    assert_eq!(documented(), *seen.rows.lock().unwrap());
    let nested = seen.nested.lock().unwrap();
    let is_in = |name: &str, parent: &str| nested.contains(&(name.into(), parent.into()));
    for (name, parent) in [
        ("commit", "prefill"),
        ("commit", "decode"),
        ("moved", "tier"),
        ("rejected", "decode"),
        ("refused", "decode"),
        ("decode", ""),
    ] {
        assert!(is_in(name, parent), "{name} in {parent}: {nested:?}");
    }
}
