//! Models with one part broken. Each must fail `whole_model` or `each_layer`; otherwise these tests would not notice such a mistake.

use std::sync::Arc;

use anyhow::Result;
use dsv4_kv::device::{Backend, Device};
use dsv4_kv::rope;
use dsv4_kv_model::Model;
use dsv4_kv_model::hyper::HyperConnection;
use dsv4_kv_model::layer::{Compressed, Layer};
use dsv4_kv_model::rotary::Rotary;
use libtest_mimic::Failed;

use crate::reference::Reference;
use crate::run::Cut;
use crate::{each_layer, whole_model};

/// The name of a part, and a function that breaks it.
type Mutation = (&'static str, fn(&mut Model));

fn layers(model: &mut Model, change: impl Fn(&mut Layer)) {
    model.layers.iter_mut().for_each(change);
}

/// The mutations; each breaks one part.
fn mutations() -> Vec<Mutation> {
    vec![
        ("no sinks", |model| layers(model, |l| l.attention.sinks.fill(-1e9))),
        ("no inverse rotation", |model| {
            layers(model, |l| l.attention.output_rotary = Rotary::new([0.0; 32]));
        }),
        ("queries of compressed layers rotated as those of window layers", |model| {
            let plain = Rotary::new(rope::plain_frequencies(model.config.rope_theta));
            layers(model, |l| {
                if !matches!(l.compressed, Compressed::Swa) {
                    l.attention.rotary = plain;
                    l.attention.output_rotary = plain;
                }
            });
        }),
        ("streams mixed by the transposed matrix", |model| {
            layers(model, |l| {
                transpose(&mut l.attention_streams);
                transpose(&mut l.experts_streams);
            });
        }),
        ("hyper-connections: base 0", |model| {
            layers(model, |l| l.attention_streams.base.fill(0.0));
        }),
        ("one round of Sinkhorn", |model| {
            layers(model, |l| l.attention_streams.constants.iterations = 1);
        }),
        ("no position bias of gates", |model| {
            layers(model, |l| match &mut l.compressed {
                Compressed::Swa => {}
                Compressed::Csa(csa) => csa.main.position_bias.fill(0.0),
                Compressed::Hca(main) => main.position_bias.fill(0.0),
            });
        }),
        ("no weights of the query's norm", |model| {
            layers(model, |l| l.attention.latent_norm.weight.fill(1.0));
        }),
        ("no weights of the keys' norm", |model| {
            layers(model, |l| l.attention.kv_norm.weight.fill(1.0))
        }),
        ("no limit of the experts' swiglu", |model| {
            layers(model, |l| l.experts.routed.iter_mut().for_each(|e| e.limit = f32::INFINITY));
        }),
        ("no shared expert", |model| {
            layers(model, |l| l.experts.shared.down.weight.fill(0.0));
        }),
    ]
}

/// Swaps the axes of the matrix that mixes the streams.
fn transpose(connection: &mut HyperConnection) {
    let n = connection.constants.streams;
    let place = |from: usize, to: usize| 2 * n + from * n + to;
    for from in 0..n {
        for to in 0..from {
            let (one, other) = (place(from, to), place(to, from));
            connection.base.swap(one, other);
            for column in 0..connection.projection.weight.ncols() {
                connection.projection.weight.swap([one, column], [other, column]);
            }
        }
    }
}

/// Runs each mutation through `whole_model` and `each_layer`.
pub fn each_is_seen<B: Backend>(device: &Device<B>, reference: &Reference) -> Result<(), Failed> {
    let mut missed = Vec::new();
    for (name, mutate) in mutations() {
        let mut model = Model::clone(&reference.model);
        mutate(&mut model);
        let mutated = reference.mutated(Arc::new(model));
        let by_layer: Result<()> = each_layer::check(device, &mutated, Cut::Whole);
        let seen = match by_layer {
            Err(error) => Some(error),
            Ok(()) if reference.chooses_nothing_by_score() => {
                whole_model::check(device, &mutated).err()
            }
            Ok(()) => None,
        };
        match seen {
            Some(error) => println!("{name}: {error}"),
            None => missed.push(name),
        }
    }
    if missed.is_empty() { Ok(()) } else { Err(format!("not seen: {missed:?}").into()) }
}
