//! A source that is asked, and does not answer.

use std::time::Duration;

use dsv4_kv::transfer::{MoveError, Positions, Reserved};
use dsv4_kv_tests::fed::{Padding, Part};
use dsv4_kv_transfer::mistake::{Mistake, make};
use dsv4_kv_transfer::transport::{Fabric, Loopback};
use dsv4_kv_transfer::{
    Claim, Claimed, Control, Receiver, Sender, Source, Target, TransferError, Verified,
};

use crate::world::{BLOCKS, MOST, NEVER, World, deadlines};

const SECOND: Duration = Duration::from_secs(1);

/// A control channel, by hand.
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
        Ok(self.answer)
    }

    fn give_up(&mut self, source: Source) {
        self.given_up.push(source);
    }
}

/// A request that has come.
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
        let mut sender = Sender::new(Loopback::new(&fabric), MOST);
        let verified = Self::verify(&mut world, &mut sender, &fabric);
        Self { world, sender, fabric, verified, hand: Hand::default() }
    }

    /// A request that is offered, comes and is verified.
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
        let room = self.world.target.fed.manager.reserve(at).unwrap();
        self.load_into(room, until)
    }

    fn load_into(&mut self, room: Reserved, until: Duration) -> Result<Claim, TransferError> {
        let site = &mut self.world.target;
        let stream = site.fed.stream.clone();
        let mut target = Target {
            cache: &mut site.fed.manager,
            stream: &stream,
            port: &mut site.port,
            weights: crate::world::weights(),
        };
        target.load(&self.verified, room, until, &mut self.hand)
    }

    fn settle(&mut self, now: Duration, claim: Claim) -> Result<Claimed, TransferError> {
        let site = &mut self.world.target;
        let stream = site.fed.stream.clone();
        let mut target = Target {
            cache: &mut site.fed.manager,
            stream: &stream,
            port: &mut site.port,
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

/// Steps of the target's cache run while a source is asked; at its deadline the room is free, and the source was told.
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
    // What the deadline is against.
    make(Mistake::ClaimWithoutEnd);
    let claim = waits(came.settle(1000 * SECOND, claim));
    make(Mistake::Nothing);
    let error = came.settle(SECOND, claim).unwrap_err();
    let is_it = matches!(error, TransferError::NotAnswered { source_of, until: SECOND } if source_of == source);
    assert!(is_it && came.is_free(), "{error}");
    assert_eq!(came.hand.given_up, [source]);
    // The source had not heard the question, and hears this: it has its memory, and its request.
    assert!(came.sender.give_up(source) && !came.sender.claim(source));
    assert_eq!(came.sender.held_bytes(), 0);
}

/// A source that says yes too late has given the request up, and nobody has it; it learns that from the target.
pub fn a_late_yes_is_nobodys() {
    let mut came = Came::new();
    let claim = came.load(SECOND);
    let source = claim.source();
    assert!(came.sender.claim(source));
    came.settle(SECOND, claim).unwrap_err();
    assert!(came.is_free() && came.hand.given_up == [source]);
    assert!(!came.sender.give_up(source), "it is not the source's any more");
    // An answer in the same moment as the deadline is not late.
    let mut came = Came::new();
    let claim = came.load(SECOND);
    came.hand.answer = Some(true);
    let claimed = came.settle(SECOND, claim).unwrap();
    let Claimed::Admitted(id) = claimed else { panic!("{claimed:?}") };
    assert_eq!(came.world.target.export(id).1, came.verified.payload());
    assert!(came.hand.given_up.is_empty(), "the source has given it up itself");
}

/// A payload is asked for once: a yes that comes late would be taken for one to the second question, and the request would be
/// in two places.
pub fn a_payload_is_asked_for_once() {
    let mut came = Came::new();
    let claim = came.load(SECOND);
    let source = claim.source();
    came.settle(SECOND, claim).unwrap_err();
    // The source computes the request itself.
    assert!(came.sender.give_up(source));
    let refused = came.try_load(SECOND).unwrap_err();
    let is_it = matches!(refused, TransferError::AskedBefore { source_of } if source_of == source);
    assert!(is_it && came.is_free() && came.hand.asked.len() == 1, "{refused}");
    // What that is against.
    make(Mistake::AsksAgain);
    let claim = came.load(SECOND);
    came.hand.answer = Some(true);
    let claimed = came.settle(Duration::ZERO, claim);
    make(Mistake::Nothing);
    assert!(matches!(claimed, Ok(Claimed::Admitted(_))), "{claimed:?}");
}

/// Room and claims of another cache are handed back, whatever else is wrong: that cache alone can free them.
pub fn room_of_another_cache_is_handed_back() {
    let handed_back = |error| match error {
        TransferError::Cache(MoveError::ForeignRoom(room)) => room,
        other => panic!("{other}"),
    };
    let mut came = Came::new();
    let mut other = Came::new();
    let at = came.verified.manifest().at;
    let short = Positions { trunk: at.trunk - 1, draft: at.draft - 1 };
    let frees = |other: &mut Came, room| {
        assert_eq!(other.world.target.fed.manager.ledger().live_requests(), 1);
        other.world.target.fed.manager.give_back(room).unwrap();
        assert!(other.is_free());
    };
    for at in [at, short] {
        let room = other.world.target.fed.manager.reserve(at).unwrap();
        let room = handed_back(came.load_into(room, SECOND).unwrap_err());
        frees(&mut other, room);
    }
    for answer in [Some(false), None, Some(true)] {
        other.verified = Came::verify(&mut other.world, &mut other.sender, &other.fabric);
        let claim = other.load(SECOND);
        came.hand.answer = answer;
        let room = handed_back(came.settle(SECOND, claim).unwrap_err());
        frees(&mut other, room);
    }
    assert!(came.is_free());
}

/// Whoever gives up tells the source: the target's client, and the target that is told no. Without it the source holds what
/// nobody wants.
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
            port: &mut site.port,
            weights: crate::world::weights(),
        };
        target.give_up(claim, &mut came.hand).unwrap();
        assert!(came.is_free() && came.hand.given_up.len() == told);
        for source in std::mem::take(&mut came.hand.given_up) {
            assert!(came.sender.give_up(source));
        }
        assert_eq!(came.sender.offers(), 1 - told);
        // Room for another position: refused before the source is asked.
        let at = Positions { trunk: 136, draft: 136 };
        let room = came.world.target.fed.manager.reserve(at).unwrap();
        let site = &mut came.world.target;
        let mut target = Target {
            cache: &mut site.fed.manager,
            stream: &stream,
            port: &mut site.port,
            weights: crate::world::weights(),
        };
        let refused = target.load(&came.verified, room, NEVER, &mut came.hand).unwrap_err();
        assert!(matches!(refused, TransferError::OtherRoom { .. }), "{refused}");
        assert!(came.is_free() && came.hand.given_up.len() == told);
        make(Mistake::Nothing);
    }
}
