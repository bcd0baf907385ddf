//! Dynamo's own conformance kit, a complete move between two workers, and moves that fail.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dynamo_backend_common::testing::{mock_context, run_conformance};
use dynamo_backend_common::{
    DisaggregationMode, FinishReason, GenerateContext, LLMEngine, LLMEngineOutput, OutputOptions,
    PrefillResult, PreprocessedRequest, SamplingOptions, StopConditions,
};
use dynamo_worker::{KvWorker, Options};
use futures::StreamExt;
use serde_json::{Value, json};

fn options(mode: DisaggregationMode, exchange: &Path) -> Options {
    Options {
        model: PathBuf::from("../../tests/e2e/hash"),
        model_name: "hash".into(),
        revision: "r1".into(),
        // One of its own, which the worker makes: it refuses one that others may write.
        exchange: exchange.join("exchange"),
        control: "127.0.0.1:0".into(),
        max_requests: 4,
        context: 512,
        chunk: 128,
        checkpoints: 8,
        gpu: false,
        mode,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dynamos_conformance_kit_passes() {
    let exchange = tempfile::tempdir().unwrap();
    run_conformance(|| KvWorker::new(options(DisaggregationMode::Aggregated, exchange.path())))
        .await
        .unwrap_or_else(|failure| panic!("{failure}"));
}

fn request(tokens: &[u32], params: Option<Value>) -> PreprocessedRequest {
    let greedy = SamplingOptions { temperature: Some(0.0), ..Default::default() };
    let prefill =
        |disaggregated_params| PrefillResult { disaggregated_params, prompt_tokens_details: None };
    PreprocessedRequest::builder()
        .model("hash".to_owned())
        .token_ids(tokens.to_vec())
        .stop_conditions(StopConditions { max_tokens: Some(6), ..Default::default() })
        .sampling_options(greedy)
        .output_options(OutputOptions::default())
        .prefill_result(params.map(prefill))
        .build()
        .unwrap()
}

async fn answers(worker: &KvWorker, request: PreprocessedRequest) -> Vec<LLMEngineOutput> {
    let ctx = GenerateContext::new(mock_context(), None);
    let stream = worker.generate(request, ctx).await.unwrap();
    stream.map(|item| item.unwrap()).collect().await
}

/// The generated tokens, and the number of prompt tokens that were not computed.
async fn tokens(worker: &KvWorker, request: PreprocessedRequest) -> (Vec<u32>, Option<u32>) {
    let answers = answers(worker, request).await;
    let last = answers.last().unwrap();
    assert!(matches!(last.finish_reason, Some(FinishReason::Length)), "{last:?}");
    let details = last.completion_usage.as_ref().unwrap().prompt_tokens_details.clone();
    let tokens = answers.iter().flat_map(|answer| answer.token_ids.clone()).collect();
    (tokens, details.and_then(|details| details.cached_tokens))
}

async fn ticket(worker: &KvWorker, prompt: &[u32]) -> Value {
    let mut answers = answers(worker, request(prompt, None)).await;
    assert_eq!(answers.len(), 1, "the router takes the ticket from the first");
    answers.remove(0).disaggregated_params.expect("a ticket")
}

/// Waits until a prefill worker has this many offers; decode workers tell it by messages.
async fn wait_for_offers(prefill: &KvWorker, count: usize) {
    let begun = std::time::Instant::now();
    while prefill.offers() != count {
        assert!(begun.elapsed() < Duration::from_secs(20), "{} offers", prefill.offers());
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn start(mode: DisaggregationMode, exchange: &Path) -> KvWorker {
    let worker = KvWorker::new(options(mode, exchange));
    worker.start(0).await.unwrap();
    worker
}

/// A prompt that was computed elsewhere continues as it does alone. With any invalid ticket it is computed here.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_moved_has_the_same_answer() {
    let directory = tempfile::tempdir().unwrap();
    let exchange = directory.path();
    let alone = start(DisaggregationMode::Aggregated, exchange).await;
    let prefill = start(DisaggregationMode::Prefill, exchange).await;
    let decode = start(DisaggregationMode::Decode, exchange).await;
    for len in [1, 2, 5, 128, 129, 200] {
        let prompt: Vec<u32> = (0..len).map(|at| (at * at + len) % 256).collect();
        let (expected, _) = tokens(&alone, request(&prompt, None)).await;
        let ticket = ticket(&prefill, &prompt).await;
        let moved = request(&prompt, Some(ticket.clone()));
        assert_eq!(tokens(&decode, moved).await, (expected.clone(), Some(len - 1)), "{len}");
        // A ticket works once: now the prompt is computed again.
        let again = request(&prompt, Some(ticket.clone()));
        assert_eq!(tokens(&decode, again).await, (expected.clone(), Some(0)), "{len}, again");
    }
    assert_eq!(prefill.is_quiescent().await.unwrap(), Some(true));
    let prompt = [9; 50];
    let (expected, _) = tokens(&alone, request(&prompt, None)).await;
    let good = ticket(&prefill, &prompt).await;
    assert_eq!(prefill.is_quiescent().await.unwrap(), Some(false), "it is offered still");
    let mut other_prompt = prompt;
    other_prompt[3] = 10;
    let (other, _) = tokens(&alone, request(&other_prompt, None)).await;
    // A ticket of other tokens is refused, and its worker is told: only the first offer is left.
    let foreign = ticket(&prefill, &prompt).await;
    let foreign = request(&other_prompt, Some(foreign));
    assert_eq!(tokens(&decode, foreign).await, (other, Some(0)));
    wait_for_offers(&prefill, 1).await;
    // An invalid ticket, one with changed bytes, and one whose worker cannot be reached.
    let mut damaged = good.clone();
    let manifest = damaged["manifest"].as_str().unwrap().to_owned();
    damaged["manifest"] =
        json!(format!("{}{}", &manifest[..300], manifest[300..].replace('0', "1")));
    let mut unreachable = good.clone();
    unreachable["control"] = json!("127.0.0.1:1");
    for wrong in [json!({}), json!(null), damaged, unreachable] {
        let asked = request(&prompt, Some(wrong));
        assert_eq!(tokens(&decode, asked).await, (expected.clone(), Some(0)));
    }
    // None of them has claimed the request.
    let moved = request(&prompt, Some(good));
    assert_eq!(tokens(&decode, moved).await, (expected, Some(49)));
    // A client that leaves: whether the request was admitted by then or not, the prefill worker keeps nothing.
    let left = ticket(&prefill, &prompt).await;
    let ctx = GenerateContext::new(mock_context(), None);
    drop(decode.generate(request(&prompt, Some(left)), ctx).await.unwrap());
    wait_for_offers(&prefill, 0).await;
    for worker in [alone, prefill, decode] {
        worker.cleanup().await.unwrap();
    }
}

/// A client that leaves before it has its ticket: the offer is taken back then, and not after a minute.
#[tokio::test(flavor = "multi_thread")]
async fn an_offer_that_nobody_gets_is_taken_back() {
    let directory = tempfile::tempdir().unwrap();
    let prefill = start(DisaggregationMode::Prefill, directory.path()).await;
    for is_stopped in [true, false] {
        let context = mock_context();
        let ctx = GenerateContext::new(Arc::clone(&context), None);
        let mut stream = prefill.generate(request(&[7; 50], None), ctx).await.unwrap();
        // The prompt is computed and offered, and nobody has asked for the result.
        wait_for_offers(&prefill, 1).await;
        if is_stopped {
            context.stop_generating();
            let last = stream.next().await.unwrap().unwrap();
            assert!(last.disaggregated_params.is_none(), "{last:?}");
            wait_for_offers(&prefill, 0).await;
        }
        drop(stream);
        wait_for_offers(&prefill, 0).await;
    }
    prefill.cleanup().await.unwrap();
}

/// A revision that does not tell weights apart is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_revision_is_not_empty() {
    let directory = tempfile::tempdir().unwrap();
    let own = options(DisaggregationMode::Aggregated, directory.path());
    let worker = KvWorker::new(Options { revision: String::new(), ..own });
    assert!(worker.start(0).await.is_err());
}

/// Prefixes are reused, and reported to routers.
#[tokio::test(flavor = "multi_thread")]
async fn prefixes_are_reused_and_told() {
    let exchange = tempfile::tempdir().unwrap();
    let worker = Arc::new(start(DisaggregationMode::Aggregated, exchange.path()).await);
    assert_eq!(worker.kv_event_sources().await.unwrap().len(), 1);
    let prompt: Vec<u32> = (0..300).map(|at| at % 251).collect();
    let first = tokens(&worker, request(&prompt, None)).await;
    assert_eq!(first.1, Some(0));
    assert_eq!(tokens(&worker, request(&prompt, None)).await, (first.0, Some(256)));
    let cut = tokio::time::timeout(Duration::from_secs(30), worker.cleanup()).await;
    cut.unwrap().unwrap();
}
