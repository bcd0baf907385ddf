//! Claims: sources that do not answer or answer late, and offers that arrive twice.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use dsv4_kv::device::Emulator;
use dsv4_kv::transfer::{MoveError, Positions, Reserved};
use dsv4_kv_tests::fed::{Padding, Part};
use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::protocol::Offer;
use dsv4_kv_transfer::transport::{Fabric, Loopback};
use dsv4_kv_transfer::{
    Claim, Claimed, Control, Receiver, Sender, Source, Target, TransferError, TransferId, Verified,
};

use crate::world::{BLOCKS, MAX_BYTES, NEVER, World, deadlines};

const SECOND: Duration = Duration::from_secs(1);

/// A control channel whose answers the test sets. It gives each answer once.
#[derive(Default)]
struct Hand {
    asked: Vec<Source>,
    answer: Option<bool>,
    given_up: Vec<Source>,
}

impl Control for Hand {
    fn ask(&mut self, source: Source) -> Result<(), String> {
        self.asked.push(source);
        Ok(())
    }

    fn answer(&mut self, _source: Source) -> Result<Option<bool>, String> {
        Ok(self.answer.take())
    }

    fn give_up(&mut self, source: Source) {
        self.given_up.push(source);
    }
}

/// A request that was read and verified.
struct Came {
    world: World,
    sender: Sender<Loopback>,
    fabric: Fabric,
    verified: Verified,
    hand: Hand,
}

impl Came {
    fn new() -> Self {
        let (mut world, fabric) = (World::new(), Fabric::default());
        let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
        let verified = Self::verify(&mut world, &mut sender, &fabric);
        Self { world, sender, fabric, verified, hand: Hand::default() }
    }

    /// Offers a request, reads it and verifies it.
    fn verify(world: &mut World, sender: &mut Sender<Loopback>, fabric: &Fabric) -> Verified {
        let offer = world.offer(sender, 2);
        let mut receiver = Receiver::new(Loopback::new(fabric), deadlines(), 1 << 30);
        receiver.begin(Duration::ZERO, &offer, &world.expected()).unwrap();
        receiver.poll(Duration::ZERO).remove(0).1.unwrap()
    }

    fn load(&mut self, until: Duration) -> Claim {
        self.try_load(until).unwrap()
    }

    fn try_load(&mut self, until: Duration) -> Result<Claim, TransferError> {
        let at = self.verified.manifest().at;
        let reserved = self.world.target.fed.manager.reserve(at).unwrap();
        self.load_into(reserved, until)
    }

    fn load_into(&mut self, reserved: Reserved, until: Duration) -> Result<Claim, TransferError> {
        let site = &mut self.world.target;
        let stream = site.fed.stream.clone();
        let mut target = Target {
            cache: &mut site.fed.manager,
            stream: &stream,
            staging: &mut site.staging,
            weights: crate::world::weights(),
        };
        target.load(&self.verified, reserved, until, &mut self.hand)
    }

    fn settle(&mut self, now: Duration, claim: Claim) -> Result<Claimed, TransferError> {
        let site = &mut self.world.target;
        let stream = site.fed.stream.clone();
        let mut target = Target {
            cache: &mut site.fed.manager,
            stream: &stream,
            staging: &mut site.staging,
            weights: crate::world::weights(),
        };
        target.settle(now, claim, &mut self.hand)
    }

    fn is_free(&self) -> bool {
        let ledger = self.world.target.fed.manager.ledger();
        (ledger.free_blocks(), ledger.live_requests()) == (BLOCKS, 0)
    }
}

fn waits(claimed: Result<Claimed, TransferError>) -> Claim {
    match claimed {
        Ok(Claimed::Waits(claim)) => claim,
        other => panic!("{other:?}"),
    }
}

/// The target's cache runs steps while a claim is open. At the deadline the reservation is ended, and the source is told.
pub fn a_silent_source_holds_nobody() {
    let mut came = Came::new();
    let claim = came.load(SECOND);
    let source = came.verified.manifest().source;
    assert_eq!((claim.source(), claim.until(), &came.hand.asked), (source, SECOND, &vec![source]));
    let claim = waits(came.settle(Duration::ZERO, claim));
    // The cache computes something else meanwhile.
    let fed = &mut came.world.target.fed;
    let other = fed.manager.admit().unwrap();
    fed.step(&[Part::new(other, &came.world.story, 0..5)], Padding::None);
    assert_eq!(fed.manager.positions(other).unwrap().trunk, 5);
    fed.manager.release(other).unwrap();
    let claim = waits(came.settle(SECOND - Duration::from_nanos(1), claim));
    assert!(!came.is_free() && came.hand.given_up.is_empty());
    // Without the deadline the claim stays open.
    make(Mistake::ClaimWithoutEnd);
    let claim = waits(came.settle(1000 * SECOND, claim));
    make(Mistake::Nothing);
    let error = came.settle(SECOND, claim).unwrap_err();
    let is_it = matches!(error, TransferError::NotAnswered { source_of, until: SECOND } if source_of == source);
    assert!(is_it && came.is_free(), "{error}");
    assert_eq!(came.hand.given_up, [source]);
    // The source missed the question but gets this message: it still has the memory and the request.
    assert!(came.sender.give_up(source) && !came.sender.claim(source));
    assert_eq!(came.sender.held_bytes(), 0);
}

/// A source that says yes too late has released the request, so that no cache has it. The target tells it.
pub fn a_late_yes_is_nobodys() {
    let mut came = Came::new();
    let claim = came.load(SECOND);
    let source = claim.source();
    assert!(came.sender.claim(source));
    came.settle(SECOND, claim).unwrap_err();
    assert!(came.is_free() && came.hand.given_up == [source]);
    assert!(!came.sender.give_up(source), "it is not the source's any more");
    // An answer exactly at the deadline is not late.
    let mut came = Came::new();
    let claim = came.load(SECOND);
    came.hand.answer = Some(true);
    let claimed = came.settle(SECOND, claim).unwrap();
    let Claimed::Admitted(id) = claimed else { panic!("{claimed:?}") };
    assert_eq!(came.world.target.export(id).1, came.verified.payload());
    assert!(came.hand.given_up.is_empty(), "the source has given it up itself");
}

/// A payload is claimed only once: a late yes to the first claim would be taken for an answer to the second, and the
/// request would be in two places.
pub fn a_payload_is_asked_for_once() {
    let mut came = Came::new();
    let claim = came.load(SECOND);
    let source = claim.source();
    came.settle(SECOND, claim).unwrap_err();
    // The source continues with the request itself.
    assert!(came.sender.give_up(source));
    let refused = came.try_load(SECOND).unwrap_err();
    let is_it = matches!(refused, TransferError::AskedBefore { source_of } if source_of == source);
    assert!(is_it && came.is_free() && came.hand.asked.len() == 1, "{refused}");
    // Without the check the request is admitted again.
    make(Mistake::AsksAgain);
    let claim = came.load(SECOND);
    came.hand.answer = Some(true);
    let claimed = came.settle(Duration::ZERO, claim);
    make(Mistake::Nothing);
    assert!(matches!(claimed, Ok(Claimed::Admitted(_))), "{claimed:?}");
}

/// A control channel that keeps a source's answer until the source is given up, which is allowed.
#[derive(Default)]
struct Keeps {
    /// Questions that have not reached the source.
    asked: Vec<Source>,
    answers: HashMap<Source, bool>,
}

impl Keeps {
    /// Delivers a question to the source, and its answer.
    fn hear(&mut self, sender: &mut Sender<Loopback>) {
        let source = self.asked.remove(0);
        self.answers.insert(source, sender.claim(source));
    }
}

impl Control for Keeps {
    fn ask(&mut self, source: Source) -> Result<(), String> {
        self.asked.push(source);
        Ok(())
    }

    fn answer(&mut self, source: Source) -> Result<Option<bool>, String> {
        Ok(self.answers.get(&source).copied())
    }

    fn give_up(&mut self, source: Source) {
        self.answers.remove(&source);
    }
}

/// A target that gets the same offer several times.
struct Repeated {
    world: World,
    sender: Sender<Loopback>,
    receiver: Receiver<Loopback>,
    offer: Offer,
    source: Source,
    keeps: Keeps,
}

impl Repeated {
    fn new() -> Self {
        let (mut world, fabric) = (World::new(), Fabric::default());
        let mut sender = Sender::new(Loopback::new(&fabric), MAX_BYTES);
        let (source, offer) = world.offer_until(&mut sender, 2, NEVER);
        let receiver = Receiver::new(Loopback::new(&fabric), deadlines(), MAX_BYTES);
        Self { world, sender, receiver, offer, source, keeps: Keeps::default() }
    }

    fn begin(&mut self) -> Result<TransferId, TransferError> {
        self.receiver.begin(Duration::ZERO, &self.offer, &self.world.expected())
    }

    fn came(&mut self) -> Vec<Verified> {
        let ended = self.receiver.poll(Duration::ZERO).into_iter();
        ended.map(|(_, verified)| verified.unwrap()).collect()
    }

    fn load(&mut self, verified: &Verified) -> Claim {
        let Self { world, keeps, .. } = self;
        let reserved = world.target.fed.manager.reserve(verified.manifest().at).unwrap();
        target(world, |target| target.load(verified, reserved, SECOND, keeps)).unwrap()
    }

    fn settle(&mut self, claim: Claim) -> Result<Claimed, TransferError> {
        let Self { world, keeps, .. } = self;
        target(world, |target| target.settle(Duration::ZERO, claim, keeps))
    }

    /// The state that a refused offer must not change.
    fn state(&self) -> [u64; 8] {
        let Self { world, sender, receiver, .. } = self;
        let ledger = world.target.fed.manager.ledger();
        [
            receiver.taken_bytes(),
            receiver.idle_bytes(),
            receiver.reads() as u64,
            receiver.stats().begun,
            sender.offers() as u64,
            sender.held_bytes(),
            ledger.free_blocks().into(),
            ledger.live_requests() as u64,
        ]
    }

    /// Repeats the offer, which is refused.
    fn refuse(&mut self) -> TransferError {
        let before = self.state();
        let refused = self.begin().unwrap_err();
        assert_eq!(self.state(), before, "{refused}");
        refused
    }
}

fn target<R>(world: &mut World, work: impl FnOnce(&mut Target<'_, Emulator>) -> R) -> R {
    let site = &mut world.target;
    let (stream, weights) = (site.fed.stream.clone(), crate::world::weights());
    let (cache, staging) = (&mut site.fed.manager, &mut site.staging);
    work(&mut Target { cache, stream: &stream, staging, weights })
}

fn is_taken(refused: &TransferError, source: Source) -> bool {
    matches!(refused, TransferError::TakenBefore { source_of } if *source_of == source)
}

fn is_asked(refused: &TransferError, source: Source) -> bool {
    matches!(refused, TransferError::AskedBefore { source_of } if *source_of == source)
}

/// An offer that the control channel delivers twice is read once. Otherwise the source's yes to the first claim would
/// be taken for an answer to the second, and the request would be in one cache twice.
pub fn an_offer_that_comes_twice() {
    let mut twice = Repeated::new();
    let source = twice.source;
    twice.begin().unwrap();
    assert!(is_taken(&twice.refuse(), source), "while it is read");
    let verified = twice.came().pop().unwrap();
    assert!(is_taken(&twice.refuse(), source), "while it waits to be admitted");
    // The payload was dropped and its source was not asked, so the offer may be repeated.
    drop(verified);
    twice.begin().unwrap();
    let verified = twice.came().pop().unwrap();
    let claim = twice.load(&verified);
    twice.keeps.hear(&mut twice.sender);
    assert!(matches!(twice.settle(claim), Ok(Claimed::Admitted(_))));
    // Without the check the request is admitted twice.
    let mut twice = Repeated::new();
    make(Mistake::OffersRepeat);
    twice.begin().unwrap();
    twice.begin().unwrap();
    make(Mistake::Nothing);
    let came = twice.came();
    let claims: Vec<_> = came.iter().map(|verified| twice.load(verified)).collect();
    twice.keeps.hear(&mut twice.sender);
    for claim in claims {
        assert!(matches!(twice.settle(claim), Ok(Claimed::Admitted(_))));
    }
    assert_eq!(twice.world.target.fed.manager.ledger().live_requests(), 2);
    twice.keeps.hear(&mut twice.sender);
    assert!(!twice.keeps.answers[&twice.source], "the source has said yes once");
}

/// An offer whose source was asked is never read again: the channel may keep the answer for ever.
pub fn an_offer_that_comes_again_late() {
    let mut late = Repeated::new();
    let source = late.source;
    late.begin().unwrap();
    let verified = late.came().pop().unwrap();
    let claim = late.load(&verified);
    assert!(is_asked(&late.refuse(), source));
    drop(verified);
    assert!(is_asked(&late.refuse(), source), "the source has not answered");
    late.keeps.hear(&mut late.sender);
    let claimed = late.settle(claim);
    assert!(matches!(claimed, Ok(Claimed::Admitted(_))), "{claimed:?}");
    assert!(is_asked(&late.refuse(), source), "the answer is there still");
    // A new offer of the same request has another source.
    let (other, offer) = late.world.offer_until(&mut late.sender, 2, NEVER);
    late.offer = offer;
    assert_ne!(source, other);
    // Transfers that were given up, and failed reads, have not asked the source.
    let id = late.begin().unwrap();
    late.receiver.give_up(id).unwrap();
    late.begin().unwrap();
    drop(late.came());
    assert!(late.sender.give_up(other));
    for _ in 0..2 {
        let failed = late.begin().unwrap_err();
        assert!(matches!(failed, TransferError::Transport(_)), "{failed}");
    }
}

/// Reservations and claims of another cache are returned in all cases, since only that cache can free them, and the source's
/// answer to a claim is left for that cache.
pub fn room_of_another_cache_is_handed_back() {
    let handed_back = |error| match error {
        TransferError::Cache(MoveError::ForeignReservation(reserved)) => reserved,
        other => panic!("{other}"),
    };
    let mut came = Came::new();
    let mut other = Came::new();
    let at = came.verified.manifest().at;
    let short = Positions { trunk: at.trunk - 1, draft: at.draft - 1 };
    let frees = |other: &mut Came, reserved| {
        assert_eq!(other.world.target.fed.manager.ledger().live_requests(), 1);
        other.world.target.fed.manager.give_back(reserved).unwrap();
        assert!(other.is_free());
    };
    for at in [at, short] {
        let reserved = other.world.target.fed.manager.reserve(at).unwrap();
        let reserved = handed_back(came.load_into(reserved, SECOND).unwrap_err());
        frees(&mut other, reserved);
    }
    for answer in [Some(false), None, Some(true)] {
        other.verified = Came::verify(&mut other.world, &mut other.sender, &other.fabric);
        let claim = other.load(SECOND);
        other.hand.answer = answer;
        // Both have one control channel.
        std::mem::swap(&mut came.hand, &mut other.hand);
        let refused = came.settle(SECOND, claim).unwrap_err();
        std::mem::swap(&mut came.hand, &mut other.hand);
        let TransferError::ForeignClaim(claim) = refused else { panic!("{refused}") };
        match other.settle(SECOND, *claim) {
            Ok(Claimed::Admitted(id)) => {
                assert_eq!(answer, Some(true));
                other.world.target.fed.manager.release(id).unwrap();
            }
            Err(TransferError::NotHeld { .. }) => assert_eq!(answer, Some(false)),
            Err(TransferError::NotAnswered { .. }) => assert_eq!(answer, None),
            other => panic!("{other:?}"),
        }
        assert!(other.is_free());
    }
    assert!(came.is_free());
}

/// The source is told about every transfer that is given up: by the target's client, or after the source has said no.
/// Otherwise it would keep memory that is not needed.
pub fn sources_are_told() {
    for mistake in [Mistake::Nothing, Mistake::GivesUpSilently] {
        let told = usize::from(mistake == Mistake::Nothing);
        make(mistake);
        let mut came = Came::new();
        let claim = came.load(NEVER);
        let site = &mut came.world.target;
        let stream = site.fed.stream.clone();
        let mut target = Target {
            cache: &mut site.fed.manager,
            stream: &stream,
            staging: &mut site.staging,
            weights: crate::world::weights(),
        };
        target.give_up(claim, &mut came.hand).unwrap();
        assert!(came.is_free() && came.hand.given_up.len() == told);
        for source in std::mem::take(&mut came.hand.given_up) {
            assert!(came.sender.give_up(source));
        }
        assert_eq!(came.sender.offers(), 1 - told);
        // A reservation for another position is refused before the source is asked.
        let at = Positions { trunk: 136, draft: 136 };
        let reserved = came.world.target.fed.manager.reserve(at).unwrap();
        let site = &mut came.world.target;
        let mut target = Target {
            cache: &mut site.fed.manager,
            stream: &stream,
            staging: &mut site.staging,
            weights: crate::world::weights(),
        };
        let refused = target.load(&came.verified, reserved, NEVER, &mut came.hand).unwrap_err();
        assert!(matches!(refused, TransferError::OtherReservation { .. }), "{refused}");
        assert!(came.is_free() && came.hand.given_up.len() == told);
        make(Mistake::Nothing);
    }
}

/// A control channel whose calls panic, after as many as it says.
struct Panics(u32);

impl Panics {
    fn call<T>(&mut self, answer: T) -> T {
        let panics = self.0 == 0;
        self.0 = self.0.saturating_sub(1);
        assert!(!panics, "as the test wants");
        answer
    }
}

impl Control for Panics {
    fn ask(&mut self, _source: Source) -> Result<(), String> {
        self.call(Ok(()))
    }

    fn answer(&mut self, _source: Source) -> Result<Option<bool>, String> {
        self.call(Ok(Some(false)))
    }

    fn give_up(&mut self, _source: Source) {
        self.call(());
    }
}

/// A program that goes on after a panic in its control channel has all slots and blocks.
pub fn a_panic_in_the_channel_loses_no_room() {
    for calls in 0..3 {
        let Came { mut world, verified, .. } = Came::new();
        let site = &mut world.target;
        let (stream, weights) = (site.fed.stream.clone(), crate::world::weights());
        let before = site.fed.manager.ledger().free_blocks();
        let reserved = site.fed.manager.reserve(verified.manifest().at).unwrap();
        let cache = &mut site.fed.manager;
        let mut target = Target { cache, stream: &stream, staging: &mut site.staging, weights };
        let mut control = Panics(calls);
        let admitted = catch_unwind(AssertUnwindSafe(|| {
            let claim = target.load(&verified, reserved, NEVER, &mut control)?;
            target.settle(Duration::ZERO, claim, &mut control)
        }));
        assert!(admitted.is_err(), "call {calls} panics");
        let ledger = site.fed.manager.ledger();
        assert_eq!((ledger.live_requests(), ledger.free_blocks()), (0, before), "call {calls}");
    }
}
