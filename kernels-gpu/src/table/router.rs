//! The router: which experts a token goes to, and with what weights.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! router_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            ActivationTopk<ExpertWidth>
            "Selects each token's experts by sqrt(softplus(logit)) + bias; weights without the bias. \
             Grid: four tokens a block, one warp each."
            (
                /// `[tokens, experts]` f32.
                logits: const f32,
                /// `[experts]` f32, for the selection only.
                bias: const f32,
                /// `[tokens]` negative = padding.
                token: const i32,
                /// `[tokens, selected]` experts, best first; -1 for padding.
                ids: mut i32,
                /// `[tokens, selected]` f32; 0 for padding.
                weights: mut f32,
                /// `[1]` count of logits and biases that are no numbers.
                faults: mut u32;
                ActivationTopkParams
            )
            { block: 128, min_blocks: 4, shared: 0, min_sm: 90 }
            bodies {
                ExpertWidth::W256 => activation_topk_256: router::topk::activation_topk::<2>,
                ExpertWidth::W384 => activation_topk_384: router::topk::activation_topk::<3>,
                ExpertWidth::W512 => activation_topk_512: router::topk::activation_topk::<4>,
            }

            HashRouter<()>
            "Looks each token's experts up by token id; weights from the logits of those experts. Grid: \
             16 tokens a block, eight threads each."
            (
                /// `[tokens]` token id; -1 = padding.
                token: const i32,
                /// `[vocabulary, selected]` experts of each token id.
                table: const i32,
                /// `[tokens, experts]` f32.
                logits: const f32,
                /// `[tokens, selected]` experts, as the table lists them; -1 for padding.
                ids: mut i32,
                /// `[tokens, selected]` f32; 0 for padding.
                weights: mut f32,
                /// `[1]` count of token ids and experts out of range, and of logits that are no
                /// numbers.
                faults: mut u32;
                HashRouterParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90 }
            bodies {
                () => hash_router: router::hash::hash_router,
            }

            DenseRouterDecode<ExpertWidth>
            "Routes up to 64 tokens from their hidden states: product with the gate's weights, then as \
             `activation_topk`. Grid: a cluster of 8 blocks for 24 or 32 experts."
            (
                /// `[tokens, hidden]` BF16.
                x: const u16,
                /// `[experts, hidden]` BF16.
                gate: const u16,
                /// `[experts]` f32, for the selection only.
                bias: const f32,
                /// `[tokens]` negative = padding.
                token: const i32,
                /// `[64, experts]` f32, where blocks leave the activations.
                activations: mut f32,
                /// `[8]` blocks that have; zero before and after.
                arrivals: mut u32,
                /// `[tokens, selected]` experts, best first; -1 for padding.
                ids: mut i32,
                /// `[tokens, selected]` f32; 0 for padding.
                weights: mut f32,
                /// `[1]` count of logits and biases that are no numbers.
                faults: mut u32;
                DenseRouterDecodeParams
            )
            { block: 256, min_blocks: 1, shared: 45060, min_sm: 90, cluster: 8 }
            bodies {
                ExpertWidth::W256 => dense_router_decode_256: router::decode::dense::<2, 3>,
                ExpertWidth::W384 => dense_router_decode_384: router::decode::dense::<3, 4>,
                ExpertWidth::W512 => dense_router_decode_512: router::decode::dense::<4, 4>,
            }

            HashRouterDecode<ExpertWidth>
            "Routes up to 64 tokens of a hash layer from their hidden states: product with the gate's \
             weights, then as `hash_router`. Grid: a cluster of 8 blocks for 24 or 32 experts."
            (
                /// `[tokens, hidden]` BF16.
                x: const u16,
                /// `[experts, hidden]` BF16.
                gate: const u16,
                /// `[vocabulary, selected]` experts of each token id.
                table: const i32,
                /// `[tokens]` token id; -1 = padding.
                token: const i32,
                /// `[64, experts]` f32, where blocks leave the activations.
                activations: mut f32,
                /// `[8]` blocks that have; zero before and after.
                arrivals: mut u32,
                /// `[tokens, selected]` experts, as the table lists them; -1 for padding.
                ids: mut i32,
                /// `[tokens, selected]` f32; 0 for padding.
                weights: mut f32,
                /// `[1]` count of token ids and experts out of range, and of logits that are no
                /// numbers.
                faults: mut u32;
                HashRouterDecodeParams
            )
            { block: 256, min_blocks: 1, shared: 45060, min_sm: 90, cluster: 8 }
            bodies {
                ExpertWidth::W256 => hash_router_decode_256: router::decode::hash::<3>,
                ExpertWidth::W384 => hash_router_decode_384: router::decode::hash::<4>,
                ExpertWidth::W512 => hash_router_decode_512: router::decode::hash::<4>,
            }

            RouterLogits<()>
            "Logits of any number of tokens from their hidden states. Grid: (128 tokens, 64 experts)."
            (
                /// `[tokens, hidden]` BF16.
                x: const u16,
                /// `[experts, hidden]` BF16.
                gate: const u16,
                /// `[tokens, experts]` f32.
                logits: mut f32;
                RouterLogitsParams
            )
            { block: 256, min_blocks: 2, shared: 49152, min_sm: 90 }
            bodies {
                () => router_logits: router::prefill::logits,
            }
        } }
    };
}
