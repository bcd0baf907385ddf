//! The metrics of a server, in Prometheus' text format.

use std::sync::Arc;

use metrics::{Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge};
use metrics::{describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use dsv4_kv::metrics::CacheMetrics;

use crate::error::ServerError;

/// Upper bounds of the histograms' buckets, in seconds.
const SECONDS: [f64; 16] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];

const REQUESTS: &str = "dsv4_requests_total";
const QUEUE_TIME: &str = "dsv4_request_queue_time_seconds";
const TIME_TO_FIRST_TOKEN: &str = "dsv4_time_to_first_token_seconds";
const INTER_TOKEN: &str = "dsv4_inter_token_latency_seconds";
const END_TO_END: &str = "dsv4_e2e_request_latency_seconds";
const HISTOGRAMS: [&str; 4] = [QUEUE_TIME, TIME_TO_FIRST_TOKEN, INTER_TOKEN, END_TO_END];

/// The metrics of one server.
#[derive(Clone)]
pub struct Metrics {
    /// Requests that were answered completely.
    pub completed: Counter,
    /// Requests whose client disconnected before the end.
    pub cancelled: Counter,
    /// Requests that were refused, with a 4xx or 503.
    pub refused: Counter,
    /// Requests that were accepted and not completed, because of an error or a shutdown, and those that were not
    /// accepted because of an error of the server other than 503.
    pub failed: Counter,
    /// Sequences in the cache.
    pub running: Gauge,
    /// Sequences that wait, including preempted ones.
    pub waiting: Gauge,
    /// Prompt tokens of sequences that have generated their first token.
    pub prompt_tokens: Counter,
    /// Tokens that were generated.
    pub generated_tokens: Counter,
    /// Time from submission to the first admission, in seconds.
    pub queue_time: Histogram,
    /// Time from submission to the first token, in seconds.
    pub time_to_first_token: Histogram,
    /// Time from a token to the next, in seconds.
    pub inter_token: Histogram,
    /// Time from the arrival of a request to its complete answer, in seconds; only completed requests.
    pub end_to_end: Histogram,
    /// How often sequences were preempted: released from the cache, to be computed again.
    pub preemptions: Counter,
    /// The metrics of the cache.
    pub cache: CacheMetrics,
    /// Prefixes that were stored in the cold tier.
    pub cold_stored: Counter,
    /// Tokens of prefixes that were restored from the cold tier.
    pub cold_restored_tokens: Counter,
    /// Objects of the cold tier that could not be stored or read, or whose contents were wrong.
    pub cold_failures: Counter,
    /// Steps that have run.
    pub steps: Counter,
    /// Steps that have failed.
    pub failed_steps: Counter,
    rendering: Arc<PrometheusHandle>,
}

impl Metrics {
    /// Metrics at zero, in a separate recorder, so that two servers in a process share none.
    ///
    /// # Errors
    /// [`ServerError::Metrics`] if the recorder refuses its buckets.
    pub fn new() -> Result<Self, ServerError> {
        let refused = |error: metrics_exporter_prometheus::BuildError| {
            ServerError::Metrics(error.to_string())
        };
        let with_buckets = |builder: PrometheusBuilder, name: &str| {
            builder.set_buckets_for_metric(Matcher::Full(name.into()), &SECONDS).map_err(refused)
        };
        let builder = HISTOGRAMS.into_iter().try_fold(PrometheusBuilder::new(), with_buckets)?;
        let recorder = builder.build_recorder();
        let rendering = Arc::new(recorder.handle());
        Ok(metrics::with_local_recorder(&recorder, || Self::registered(rendering)))
    }

    fn registered(rendering: Arc<PrometheusHandle>) -> Self {
        let counted = |name: &'static str, what: &'static str| {
            describe_counter!(name, what);
            counter!(name)
        };
        let gauged = |name: &'static str, what: &'static str| {
            describe_gauge!(name, what);
            gauge!(name)
        };
        let timed = |name: &'static str, what: &'static str| {
            describe_histogram!(name, Unit::Seconds, what);
            histogram!(name)
        };
        let outcome = |outcome: &'static str| counter!(REQUESTS, "outcome" => outcome);
        describe_counter!(REQUESTS, "Requests for completions, by outcome");
        let metrics = Self {
            completed: outcome("completed"),
            cancelled: outcome("cancelled"),
            refused: outcome("refused"),
            failed: outcome("failed"),
            running: gauged("dsv4_num_requests_running", "Sequences in the cache"),
            waiting: gauged("dsv4_num_requests_waiting", "Sequences that wait, preempted ones too"),
            prompt_tokens: counted(
                "dsv4_prompt_tokens_total",
                "Tokens of prompts whose first token has come",
            ),
            generated_tokens: counted("dsv4_generation_tokens_total", "Tokens that were generated"),
            queue_time: timed(QUEUE_TIME, "From submission to the first admission"),
            time_to_first_token: timed(TIME_TO_FIRST_TOKEN, "From submission to the first token"),
            inter_token: timed(INTER_TOKEN, "From a token to the next"),
            end_to_end: timed(
                END_TO_END,
                "Of requests that were completed, from their arrival to the end of the last answer",
            ),
            preemptions: counted(
                "dsv4_num_preemptions_total",
                "Sequences that were taken out of the cache, to be computed again",
            ),
            cache: CacheMetrics::new(&[]),
            cold_stored: counted(
                "dsv4_kv_cold_stored_prefixes_total",
                "Prefixes stored in the cold tier",
            ),
            cold_restored_tokens: counted(
                "dsv4_kv_cold_restored_tokens_total",
                "Tokens of prefixes that came from the cold tier",
            ),
            cold_failures: counted(
                "dsv4_kv_cold_failures_total",
                "Objects of the cold tier that could not be stored or read",
            ),
            steps: counted("dsv4_steps_total", "Steps that have run"),
            failed_steps: counted("dsv4_steps_failed_total", "Steps that have failed"),
            rendering,
        };
        metrics.begin_at_zero();
        metrics
    }

    /// Sets all counters to 0, so that they are shown before they have counted anything.
    fn begin_at_zero(&self) {
        for counter in [
            &self.completed,
            &self.cancelled,
            &self.refused,
            &self.failed,
            &self.prompt_tokens,
            &self.cold_stored,
            &self.cold_restored_tokens,
            &self.cold_failures,
            &self.generated_tokens,
            &self.preemptions,
            &self.steps,
            &self.failed_steps,
        ] {
            counter.absolute(0);
        }
    }

    /// All metrics in Prometheus' text format.
    #[must_use]
    pub fn render(&self) -> String {
        self.rendering.render()
    }

    /// Moves recorded values of the histograms into their buckets. Without it the histograms' memory grows between
    /// calls of [`Self::render`].
    pub fn tidy(&self) {
        self.rendering.run_upkeep();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    fn doc(name: &str) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs").join(name);
        fs::read_to_string(path).expect("it is committed")
    }

    /// Names and types of all metrics, as `name type`.
    fn rendered() -> BTreeSet<String> {
        let metrics = Metrics::new().expect("buckets");
        // Histograms are shown once they have a value.
        for histogram in [
            &metrics.queue_time,
            &metrics.time_to_first_token,
            &metrics.inter_token,
            &metrics.end_to_end,
        ] {
            histogram.record(0.1);
        }
        let text = metrics.render();
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).map(str::to_owned).collect()
    }

    #[test]
    fn the_table_of_the_docs_has_all_of_them_and_no_others() {
        let row = |line: &str| {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            let name = cells.get(1)?.strip_prefix("`dsv4_")?.strip_suffix('`')?;
            Some(format!("dsv4_{name} {}", cells.get(2)?))
        };
        let page = doc("reference/metrics.md");
        let table: BTreeSet<_> = page.lines().filter_map(row).collect();
        assert_eq!(table, rendered());
    }

    #[test]
    fn the_dashboard_asks_for_metrics_that_there_are() {
        let names: BTreeSet<_> = rendered()
            .iter()
            .filter_map(|named| named.split(' ').next().map(str::to_owned))
            .collect();
        let text = doc("grafana.json");
        let dashboard: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let mut asked = BTreeSet::new();
        for panel in dashboard["panels"].as_array().expect("panels") {
            for target in panel["targets"].as_array().expect("targets") {
                let query = target["expr"].as_str().expect("a query");
                let words = query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
                let ours = words.filter(|word| word.starts_with("dsv4_"));
                asked.extend(ours.map(|word| word.trim_end_matches("_bucket").to_owned()));
            }
        }
        assert!(asked.len() > 10 && asked.is_subset(&names), "{asked:?} of {names:?}");
    }
}
