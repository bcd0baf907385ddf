//! The scheduler without HTTP: every answer equals that of a request alone, and no request stays in the cache.

use std::sync::Arc;
use std::thread;

use dsv4_kv_device::{Backend, EmuOptions};
use dsv4_kv_model::sequence::{Continuation, Finish, Generated};
use dsv4_kv_model::{EngineLimits, Model};
use dsv4_kv_server::error::{Failure, Refusal, ServerError};
use dsv4_kv_server::metrics::Metrics;
use dsv4_kv_server::queue::{Event, Events, Queue, Submission};
use dsv4_kv_server::scheduler::{Progress, Scheduler, SchedulerLimits};
use dsv4_kv_tests::failing::{self, Failing};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::small::{self, DRAFTS, HASH, SCORED};

pub const LIMITS: SchedulerLimits = SchedulerLimits { chunk: 24, waiting: 64 };

fn scheduler(model: &Arc<Model>, requests: u32, blocks: u32) -> (Scheduler<impl Backend>, Metrics) {
    let metrics = Metrics::new().expect("metrics");
    let engine = small::engine(&small::emulated(), model, small::limits(requests, blocks));
    (Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler"), metrics)
}

/// As [`scheduler`], on a device that runs no kernel.
fn without_kernels(requests: u32, blocks: u32) -> (Scheduler<impl Backend>, Metrics) {
    let metrics = Metrics::new().expect("metrics");
    let limits = small::limits(requests, blocks);
    let engine = small::engine(&small::without_kernels(), &HASH, limits);
    (Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler"), metrics)
}

/// The value of a counter or gauge.
pub fn value(metrics: &Metrics, name: &str) -> u64 {
    number(metrics, name) as u64
}

/// A metric in seconds, as milliseconds.
pub fn milliseconds(metrics: &Metrics, name: &str) -> u64 {
    (1000.0 * number(metrics, name)) as u64
}

fn number(metrics: &Metrics, name: &str) -> f64 {
    let text = metrics.render();
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.parse::<f64>().ok())
        .unwrap_or_else(|| panic!("no {name} in {text}"))
}

pub fn submit(queue: &Queue, submission: &Submission) -> Events {
    let mut events = queue.submit(vec![submission.clone()]).expect("it is taken");
    events.pop().expect("one for each")
}

/// The events of a sequence so far: its tokens, and its last event.
pub fn received(events: &mut Events) -> (Vec<Generated>, Option<Event>) {
    let mut tokens = Vec::new();
    while let Ok(event) = events.try_recv() {
        match event {
            Event::Token(token) => tokens.push(token),
            Event::Admitted { .. } => {}
            end => return (tokens, Some(end)),
        }
    }
    (tokens, None)
}

fn assert_empty<B: Backend>(scheduler: &Scheduler<B>) {
    let ledger = scheduler.engine().cache().ledger();
    assert_eq!(ledger.free_blocks(), ledger.total_blocks(), "blocks are held by nobody");
    assert_eq!(ledger.live_requests(), 0);
}

/// Prompts of less than four tokens, which hold no block until they grow, longer ones, and one that grows into its
/// second block.
fn submissions(random: &mut StdRng, count: usize) -> Vec<Submission> {
    let submission = |index| {
        let length = match random.random_bool(0.6) {
            _ if index == 5 => 127,
            true => random.random_range(1..4),
            false => random.random_range(4..20),
        };
        // Few different tokens, so that prompt lookup finds drafts.
        let prompt = (0..length).map(|_| random.random_range(0..6)).collect();
        let max_tokens = random.random_range(1..12);
        let continuation = match random.random_bool(0.5) {
            true => small::sampled(random.random(), max_tokens),
            false => small::continuation(max_tokens),
        };
        let drafts = random.random_range(0..=DRAFTS as usize);
        let end = if random.random_bool(0.3) { (0..16).collect() } else { Vec::new() };
        Submission {
            prompt,
            continuation: Continuation { drafts, end, ..continuation },
            salt: Vec::new(),
        }
    };
    (0..count).map(submission).collect()
}

#[test]
fn requests_with_preemption_and_cancellation_equal_each_alone() {
    for (model, seed) in [(&HASH, 1), (&SCORED, 2)] {
        let mut random = StdRng::seed_from_u64(seed);
        let (mut scheduler, metrics) = scheduler(model, 8, 4);
        let queue = scheduler.queue();
        let submissions = submissions(&mut random, 14);
        let mut events: Vec<_> =
            submissions.iter().map(|submission| Some(submit(&queue, submission))).collect();
        let mut answers = vec![Vec::new(); submissions.len()];
        let mut ends = vec![None; submissions.len()];
        let mut cancelled = 0;
        while scheduler.step().expect("no step fails") == Progress::Ran {
            for (index, slot) in events.iter_mut().enumerate() {
                let Some(receiver) = slot else { continue };
                let (tokens, end) = received(receiver);
                answers[index].extend(tokens);
                ends[index] = end;
                if ends[index].is_some() {
                    *slot = None;
                } else if random.random_bool(0.03) {
                    *slot = None;
                    cancelled += 1;
                }
            }
        }
        assert!(value(&metrics, "dsv4_num_preemptions_total") > 0, "none was preempted");
        assert!((1..14).contains(&cancelled), "{cancelled} were cancelled");
        assert_empty(&scheduler);
        let mut engine = small::engine(&small::emulated(), model, small::limits(1, 2));
        let mut finished = 0;
        for ((submission, answer), end) in submissions.iter().zip(answers).zip(ends) {
            let Some(end) = end else { continue };
            finished += 1;
            let (tokens, finish) = small::alone(&mut engine, submission);
            assert_eq!(answer, tokens, "{submission:?}");
            assert_eq!(end, Event::Finished(finish));
        }
        assert_eq!(finished + cancelled, submissions.len());
    }
}

#[test]
fn sequences_that_need_the_whole_cache_come_to_their_end_one_by_one() {
    let (mut scheduler, metrics) = scheduler(&HASH, 4, 1);
    let queue = scheduler.queue();
    // Each grows into a block, and the cache has only one.
    let submission = |first| Submission {
        prompt: vec![first; 2],
        continuation: small::continuation(6),
        salt: Vec::new(),
    };
    let submissions = [1, 2, 3, 4].map(submission);
    let mut events = submissions.each_ref().map(|submission| submit(&queue, submission));
    while scheduler.step().expect("no step fails") == Progress::Ran {}
    assert!(value(&metrics, "dsv4_num_preemptions_total") > 0, "none was preempted");
    assert_empty(&scheduler);
    let mut engine = small::engine(&small::emulated(), &HASH, small::limits(1, 1));
    for (submission, events) in submissions.iter().zip(&mut events) {
        let (tokens, end) = received(events);
        assert_eq!(tokens, small::alone(&mut engine, submission).0);
        assert_eq!(end, Some(Event::Finished(Finish::Length)));
    }
}

#[test]
fn what_never_fits_is_refused_before_it_waits() {
    let (scheduler, _) = scheduler(&HASH, 2, 2);
    let queue = scheduler.queue();
    let submit = |prompt: usize, max_tokens| {
        let continuation = small::continuation(max_tokens);
        queue
            .submit(vec![Submission { prompt: vec![0; prompt], continuation, salt: Vec::new() }])
            .err()
    };
    let longest = 256;
    assert_eq!(submit(200, 56), None);
    assert_eq!(submit(200, 57), Some(Refusal::TooLong { prompt: 200, max_tokens: 57, longest }));
    let max_tokens = usize::MAX;
    assert_eq!(submit(1, max_tokens), Some(Refusal::TooLong { prompt: 1, max_tokens, longest }));
    assert_eq!(submit(0, 1), Some(Refusal::EmptyPrompt));
    let continuation = small::continuation(1);
    let unknown =
        Submission { prompt: vec![255, 256], continuation: continuation.clone(), salt: Vec::new() };
    let vocabulary = 256;
    let refusal = Refusal::TokenOutOfVocabulary { token: 256, vocabulary };
    assert_eq!(queue.submit(vec![unknown]).err(), Some(refusal));
    // One sequence waits already. A request is accepted completely or not at all.
    let one = Submission { prompt: vec![0], continuation, salt: Vec::new() };
    let _waits = queue.submit(vec![one.clone()]).expect("there is room");
    let most = LIMITS.waiting;
    assert_eq!(
        queue.submit(vec![one.clone(); 65]).err(),
        Some(Refusal::TooManySequences { sequences: 65, most })
    );
    assert_eq!(
        queue.submit(vec![one.clone(); 64]).err(),
        Some(Refusal::QueueFull { waiting: 1, most })
    );
    assert_eq!(queue.submit(vec![one.clone(); 63]).map(|events| events.len()), Ok(63));
    // Their clients have disconnected: they take no place.
    let again = queue.submit(vec![one.clone(); 63]).expect("there is room");
    assert_eq!(
        queue.submit(vec![one.clone()]).err(),
        Some(Refusal::QueueFull { waiting: 64, most })
    );
    drop(again);
    queue.close();
    assert_eq!(queue.submit(vec![one]).err(), Some(Refusal::ShuttingDown));
}

#[test]
fn drafts_do_not_hold_up_a_prompt() {
    let metrics = Metrics::new().expect("metrics");
    // No room is left beside two tokens and their drafts.
    let limits = EngineLimits { max_step_tokens: 2 * (1 + small::DRAFTS), ..small::limits(3, 16) };
    let engine = small::engine(&small::without_kernels(), &HASH, limits);
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics).expect("a scheduler");
    let queue = scheduler.queue();
    // There are always drafts, because every token occurs in the prompt.
    let continuation = Continuation { drafts: 2, ..small::continuation(500) };
    let submission = Submission { prompt: (0..256).collect(), continuation, salt: Vec::new() };
    let mut decoding = [submit(&queue, &submission), submit(&queue, &submission)];
    for events in &mut decoding {
        while received(events).0.is_empty() {
            assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
        }
    }
    let continuation = small::continuation(1);
    let mut prompt =
        submit(&queue, &Submission { prompt: vec![7; 20], continuation, salt: Vec::new() });
    // Half of the four tokens beside one of each that decodes.
    for _ in 0..10 {
        assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
    }
    assert_eq!(received(&mut prompt).1, Some(Event::Finished(Finish::Length)));
    for mut events in decoding {
        assert_eq!(received(&mut events).1, None, "the others still decode");
    }
}

/// A completion that asks for more drafts than the engine can reject gets as many as that.
#[test]
fn drafts_are_bounded_by_the_engine() {
    let (mut scheduler, _) = without_kernels(1, 4);
    // There are always drafts, because every token occurs in the prompt. The model says something else.
    let prompt: Vec<u32> = (0..256).collect();
    let answers = [0, 64].map(|drafts| {
        let continuation = Continuation { drafts, ..small::continuation(8) };
        let new = Submission { prompt: prompt.clone(), continuation, salt: Vec::new() };
        let mut events = submit(&scheduler.queue(), &new);
        while scheduler.step().expect("no step fails") == Progress::Ran {}
        let (tokens, end) = received(&mut events);
        assert_eq!(end, Some(Event::Finished(Finish::Length)));
        tokens.into_iter().map(|token| token.picked.token).collect::<Vec<_>>()
    });
    assert_eq!(answers[0], answers[1]);
}

/// A completion that shares a prefix and was preempted is admitted while another one still shares the prefix. Alone it
/// would not fit beside that one.
#[test]
fn what_is_preempted_still_shares() {
    let metrics = Metrics::new().expect("metrics");
    let limits = EngineLimits { checkpoints: 4, ..small::limits(4, 6) };
    let engine = small::engine(&small::without_kernels(), &HASH, limits);
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler");
    let queue = scheduler.queue();
    // Two blocks that all share, and a part of a third one of their own.
    let submission = |own: u32, most| small::sharing(256, (own, own as usize), most);
    let mut longest = submit(&queue, &submission(10, 110));
    while received(&mut longest).0.is_empty() {
        assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
    }
    // The first two take another block after 5 and 17 tokens, the last after 9. It is preempted when the first one does,
    // and when it does so itself.
    let mut short =
        [(124, 12), (112, 40)].map(|(own, most)| submit(&queue, &submission(own, most)));
    let mut last = submit(&queue, &submission(120, 40));
    let preemptions = || value(&metrics, "dsv4_num_preemptions_total");
    let end = loop {
        assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
        if let Some(end) = received(&mut last).1 {
            break end;
        }
    };
    assert_eq!(end, Event::Finished(Finish::Length));
    assert!(preemptions() >= 2, "{}", preemptions());
    assert_eq!(received(&mut longest).1, None, "the longest still runs");
    for events in &mut short {
        assert_eq!(received(events).1, Some(Event::Finished(Finish::Length)));
    }
}

/// Drafts need a block that is not free, or one of the last, and their request does not need it yet: they are left out,
/// and nobody is preempted. They take it if a block is left for each request.
#[test]
fn drafts_preempt_nobody() {
    for (blocks, held) in [(3, 2), (5, 2), (6, 3)] {
        let (mut scheduler, metrics) = without_kernels(2, blocks);
        let queue = scheduler.queue();
        // There are always drafts, because every token occurs in the prompt, which fills two blocks.
        let continuation = Continuation { drafts: 2, ..small::continuation(20) };
        let oldest = Submission { prompt: (0..256).collect(), continuation, salt: Vec::new() };
        let mut oldest = submit(&queue, &oldest);
        while received(&mut oldest).0.is_empty() {
            assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
        }
        // It takes the third block. In its second step the drafts of the other need one, and then it is done.
        let continuation = small::continuation(2);
        let newest = Submission { prompt: vec![7; 5], continuation, salt: Vec::new() };
        let mut newest = submit(&queue, &newest);
        for _ in 0..2 {
            assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
        }
        assert_eq!(received(&mut newest).1, Some(Event::Finished(Finish::Length)));
        let free = scheduler.engine().cache().ledger().free_blocks();
        assert_eq!(blocks - free, held, "by the oldest, which has drafts");
        assert_eq!(value(&metrics, "dsv4_num_preemptions_total"), 0);
    }
}

#[test]
fn steps_hold_a_token_of_every_request() {
    let metrics = Metrics::new().expect("metrics");
    let limits = small::limits(49, 2);
    let engine = small::engine(&small::emulated(), &HASH, limits);
    let refused = Scheduler::new(engine, LIMITS, metrics);
    let error = refused.err().expect("steps of 48 tokens are too short");
    assert!(
        matches!(error, ServerError::StepTooShort { step_tokens: 48, requests: 49 }),
        "{error}"
    );
}

#[test]
fn a_step_that_fails_ends_its_requests_and_no_other() {
    let device = Failing::emulated(EmuOptions { memory: 2 << 30, seed: 1 });
    let engine = small::engine(&device, &HASH, small::limits(2, 8));
    let metrics = Metrics::new().expect("metrics");
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler");
    let queue = scheduler.queue();
    let submission = |first| Submission {
        prompt: vec![first; 9],
        continuation: small::continuation(3),
        salt: Vec::new(),
    };
    let submissions = [1, 2, 3, 4].map(submission);
    let [mut one, mut two, mut three, mut four] =
        submissions.each_ref().map(|submission| submit(&queue, submission));
    // The first two run, the others wait.
    device.backend().fail(20, failing::Failure::Instead);
    assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
    assert!(device.backend().failed().is_some(), "nothing failed");
    for events in [&mut one, &mut two] {
        let (tokens, end) = received(events);
        assert!(
            tokens.is_empty() && matches!(end, Some(Event::Failed(Failure::Step(_)))),
            "{end:?}"
        );
    }
    while scheduler.step().expect("no step fails any more") == Progress::Ran {}
    let mut engine = small::engine(&small::emulated(), &HASH, small::limits(1, 8));
    for (events, submission) in [&mut three, &mut four].into_iter().zip(&submissions[2..]) {
        assert_eq!(received(events).0, small::alone(&mut engine, submission).0);
    }
    assert_eq!(value(&metrics, "dsv4_steps_failed_total"), 1);
    assert_empty(&scheduler);
}

/// NaNs end the requests whose tokens they come from, and no others of the same step. They are no failure of the device,
/// so they do not end the server, however often a client sends such a request.
#[test]
fn a_nan_ends_its_own_request_and_no_other() {
    let submission = |last| Submission {
        prompt: vec![1, 2, last],
        continuation: small::continuation(3),
        salt: Vec::new(),
    };
    let good = [3, 4].map(submission);
    let mut engine = small::engine(&small::without_kernels(), &HASH, small::limits(1, 2));
    let expected = good.each_ref().map(|submission| small::alone(&mut engine, submission).0);
    let generated = expected.iter().flatten().map(|token| token.picked.token);
    let used = Vec::from_iter(generated.chain([1, 2, 3, 4]));
    // A model with the same answers, in which one other token is NaN.
    let unknown = (0..256).find(|token| !used.contains(token)).expect("few are used");
    let mut model = Model::clone(&HASH);
    model.embedding.row_mut(unknown as usize).fill(f32::NAN);
    let engine = small::engine(&small::without_kernels(), &Arc::new(model), small::limits(3, 8));
    let metrics = Metrics::new().expect("metrics");
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics.clone()).expect("a scheduler");
    let queue = scheduler.queue();
    let [first, last] = good;
    let mut events =
        [first.clone(), submission(unknown), last].each_ref().map(|new| submit(&queue, new));
    while scheduler.step().expect("the device works") == Progress::Ran {}
    let [first_answer, refused, last_answer] = events.each_mut().map(received);
    for (answer, expected) in [first_answer, last_answer].into_iter().zip(expected) {
        assert_eq!(answer, (expected, Some(Event::Finished(Finish::Length))));
    }
    assert!(matches!(refused.1, Some(Event::Failed(Failure::Step(_)))), "{refused:?}");
    for failed in 1..=4 {
        assert_eq!(value(&metrics, "dsv4_steps_failed_total"), failed);
        let mut events = submit(&queue, &submission(unknown));
        assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
        assert!(matches!(received(&mut events).1, Some(Event::Failed(Failure::Step(_)))));
    }
    let mut events = submit(&queue, &first);
    while scheduler.step().expect("the device works") == Progress::Ran {}
    assert_eq!(received(&mut events).1, Some(Event::Finished(Finish::Length)));
    assert_empty(&scheduler);
}

#[test]
fn a_device_that_always_fails_ends_the_server() {
    let device = Failing::emulated(EmuOptions { memory: 2 << 30, seed: 1 });
    let engine = small::engine(&device, &HASH, small::limits(1, 8));
    let metrics = Metrics::new().expect("metrics");
    let mut scheduler = Scheduler::new(engine, LIMITS, metrics).expect("a scheduler");
    let queue = scheduler.queue();
    let submission =
        Submission { prompt: vec![1], continuation: small::continuation(3), salt: Vec::new() };
    let mut events: Vec<_> = (0..4).map(|_| submit(&queue, &submission)).collect();
    for _ in 0..2 {
        device.backend().fail(5, failing::Failure::Instead);
        assert_eq!(scheduler.step().ok(), Some(Progress::Ran));
    }
    device.backend().fail(5, failing::Failure::Instead);
    let error = scheduler.run().expect_err("three steps in a row have failed");
    assert!(matches!(error, ServerError::StepsFail { steps: 3, .. }), "{error}");
    // The last request never ran, and gets the failure too.
    for events in &mut events {
        let (_, end) = received(events);
        assert!(matches!(end, Some(Event::Failed(Failure::Step(_)))), "{end:?}");
    }
    assert_eq!(queue.submit(vec![submission]).err(), Some(Refusal::ShuttingDown));
    assert_empty(&scheduler);
}

#[test]
fn a_closed_queue_is_emptied_and_an_aborted_one_is_not() {
    let submission = Submission {
        prompt: vec![1, 2, 3],
        continuation: small::continuation(5),
        salt: Vec::new(),
    };
    for aborted in [false, true] {
        let (mut scheduler, _) = scheduler(&HASH, 1, 2);
        let queue = scheduler.queue();
        let mut events = [submit(&queue, &submission), submit(&queue, &submission)];
        if aborted {
            queue.abort()
        } else {
            queue.close()
        }
        let end = thread::spawn(move || {
            scheduler.run().expect("no step fails");
            assert_empty(&scheduler);
        });
        end.join().expect("it ends by itself");
        for events in &mut events {
            let expected = match aborted {
                true => Event::Failed(Failure::ShutDown),
                false => Event::Finished(Finish::Length),
            };
            assert_eq!(received(events).1, Some(expected));
        }
    }
}
