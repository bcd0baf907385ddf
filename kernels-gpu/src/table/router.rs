//! The router: selects the experts of each token, and computes their weights.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! router_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            ActivationTopk<ExpertWidth> |p, f|
            "Selects each token's experts by sqrt(softplus(logit)) + bias; weights without the \
             bias."
            (
                /// `[tokens, experts]` f32.
                logits: const f32 align 16 [p.tokens, p.experts],
                /// `[experts]` f32, for the selection only.
                bias: const f32 align 16 [p.experts],
                /// `[tokens]` negative = padding.
                token: const i32 [p.tokens],
                /// `[tokens, selected]` experts, best first; -1 for padding.
                ids: mut i32 [p.tokens, p.selected],
                /// `[tokens, selected]` f32; 0 for padding.
                weights: mut f32 [p.tokens, p.selected],
                /// `[1]` count of logits and biases that are no numbers.
                faults: mut u32 [1];
                ActivationTopkParams
            )
            { block: 128, min_blocks: 4, shared: 0, min_sm: 90,
              grid: [p.tokens.div_ceil(router::topk::WARPS), 1] }
            bodies {
                [ExpertWidth::W256] => activation_topk_256: router::topk::activation_topk::<2>,
                [ExpertWidth::W384] => activation_topk_384: router::topk::activation_topk::<3>,
                [ExpertWidth::W512] => activation_topk_512: router::topk::activation_topk::<4>,
            }

            HashRouter<()> |p, f|
            "Looks each token's experts up by token id; weights from the logits of those experts."
            (
                /// `[tokens]` token id; -1 = padding.
                token: const i32 [p.tokens],
                /// `[vocabulary, selected]` experts of each token id.
                table: const i32 [p.vocabulary, p.selected],
                /// `[tokens, experts]` f32.
                logits: const f32 [p.tokens, p.experts],
                /// `[tokens, selected]` experts, as the table lists them; -1 for padding.
                ids: mut i32 [p.tokens, p.selected],
                /// `[tokens, selected]` f32; 0 for padding.
                weights: mut f32 [p.tokens, p.selected],
                /// `[1]` count of token ids and experts out of range, and of logits that are no
                /// numbers.
                faults: mut u32 [1];
                HashRouterParams
            )
            { block: 128, min_blocks: 8, shared: 0, min_sm: 90,
              grid: [p.tokens.div_ceil(router::hash::BLOCK_TOKENS), 1] }
            bodies {
                [()] => hash_router: router::hash::hash_router,
            }

            DenseRouterDecode<ExpertWidth> |p, f|
            "Routes up to 64 tokens from their hidden states: product with the gate's weights, \
             then as `activation_topk`."
            (
                /// `[tokens, hidden]` BF16.
                x: const u16 align 16 [p.tokens, p.hidden],
                /// `[experts, hidden]` BF16.
                gate: const u16 align 16 [p.experts, p.hidden],
                /// `[experts]` f32, for the selection only.
                bias: const f32 align 16 [p.experts],
                /// `[tokens]` negative = padding.
                token: const i32 [p.tokens],
                /// `[64, experts]` f32, where blocks leave the activations.
                activations: mut f32 align 16 [DECODE_TOKENS, p.experts],
                /// `[8]` blocks that have; zero before and after.
                arrivals: mut u32 [DECODE_SLICES],
                /// `[tokens, selected]` experts, best first; -1 for padding.
                ids: mut i32 [p.tokens, p.selected],
                /// `[tokens, selected]` f32; 0 for padding.
                weights: mut f32 [p.tokens, p.selected],
                /// `[1]` count of logits and biases that are no numbers.
                faults: mut u32 [1];
                DenseRouterDecodeParams
            )
            { block: 256, min_blocks: 1, shared: router::decode::SHARED_BYTES, min_sm: 90, cluster: 8,
              grid: [p.experts.div_ceil(f.decode_experts()) * DECODE_SLICES, 1] }
            bodies {
                [ExpertWidth::W256] => dense_router_decode_256: router::decode::dense::<2, 3>,
                [ExpertWidth::W384] => dense_router_decode_384: router::decode::dense::<3, 4>,
                [ExpertWidth::W512] => dense_router_decode_512: router::decode::dense::<4, 4>,
            }

            HashRouterDecode<ExpertWidth> |p, f|
            "Routes up to 64 tokens of a hash layer from their hidden states: product with the \
             gate's weights, then as `hash_router`."
            (
                /// `[tokens, hidden]` BF16.
                x: const u16 align 16 [p.tokens, p.hidden],
                /// `[experts, hidden]` BF16.
                gate: const u16 align 16 [p.experts, p.hidden],
                /// `[vocabulary, selected]` experts of each token id.
                table: const i32 [p.vocabulary, p.selected],
                /// `[tokens]` token id; -1 = padding.
                token: const i32 [p.tokens],
                /// `[64, experts]` f32, where blocks leave the activations.
                activations: mut f32 align 16 [DECODE_TOKENS, p.experts],
                /// `[8]` blocks that have; zero before and after.
                arrivals: mut u32 [DECODE_SLICES],
                /// `[tokens, selected]` experts, as the table lists them; -1 for padding.
                ids: mut i32 [p.tokens, p.selected],
                /// `[tokens, selected]` f32; 0 for padding.
                weights: mut f32 [p.tokens, p.selected],
                /// `[1]` count of token ids and experts out of range, and of logits that are no
                /// numbers.
                faults: mut u32 [1];
                HashRouterDecodeParams
            )
            { block: 256, min_blocks: 1, shared: router::decode::SHARED_BYTES, min_sm: 90, cluster: 8,
              grid: [p.experts.div_ceil(f.decode_experts()) * DECODE_SLICES, 1] }
            bodies {
                [ExpertWidth::W256] => hash_router_decode_256: router::decode::hash::<3>,
                [ExpertWidth::W384] => hash_router_decode_384: router::decode::hash::<4>,
                [ExpertWidth::W512] => hash_router_decode_512: router::decode::hash::<4>,
            }

            RouterLogits<LogitsSplit> |p, f|
            "Logits of any number of tokens from their hidden states."
            (
                /// `[tokens, hidden]` BF16.
                x: const u16 align 16 [p.tokens, p.hidden],
                /// `[experts, hidden]` BF16.
                gate: const u16 align 16 [p.experts, p.hidden],
                /// `[tokens, experts]` f32.
                logits: mut f32 [p.tokens, p.experts];
                RouterLogitsParams
            )
            { block: 256, min_blocks: 1, shared: router::prefill::SHARED_BYTES, min_sm: 90, cluster: f.blocks(),
              grid: [p.tokens.div_ceil(LogitsSplit::TOKENS) * f.blocks(), p.experts.div_ceil(LogitsSplit::EXPERTS)] }
            bodies {
                [LogitsSplit::Eight] => router_logits_8: router::prefill::logits::<8>,
                [LogitsSplit::Two] => router_logits_2: router::prefill::logits::<2>,
            }
        } }
    };
}
