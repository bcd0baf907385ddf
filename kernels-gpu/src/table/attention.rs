//! Attention in place, over the stored rows of the cache.

/// Adds its rows and hands all to `$next`.
#[doc(hidden)]
#[macro_export]
macro_rules! attention_rows {
    ([$next:ident $($rest:tt)*] { $($done:tt)* }) => {
        $crate::$next! { [$($rest)*] { $($done)*
            Attend<AttendKernel> |p, f|
            "Attends to window rows and entries where they lie, one softmax over both and a sink; \
             inverse RoPE is applied to the result."
            (
                /// `[skipped + tokens, heads, 512]` BF16, after norm and RoPE, or before both if `raw_queries` is not 0.
                query: const u16 align 16 [end(p.skipped, p.tokens), p.heads, HEAD_DIM],
                /// `[heads]` f32: a score that takes its share of the softmax and gives no value.
                sinks: const f32 [p.heads],
                /// `[32]` f32, the layer's rotary frequencies.
                frequencies: const f32 [ROPE_DIM / 2],
                /// `[step]` absolute position of each query.
                token_position: const i32 [end(p.first, p.tokens)],
                /// `[step]` slot of each query's request; -1 = padding.
                token_slot: const i32 [end(p.first, p.tokens)],
                /// `[step]` tokens of the same request that precede the query in the step.
                token_index: const i32 [end(p.first, p.tokens)],
                /// `[slots * ring, 576]` u8, the data plane of the window.
                ring_data: const u8 align 16 [p.slots, p.ring, DATA_BYTES],
                /// `[slots * ring, scale_bytes]` u8, the scale plane of the window.
                ring_scale: const u8 align 8 [p.slots, p.ring, f.format.scale_bytes() as u32],
                /// `[own_rows, 576]` u8, the step's own rows, quantised, if they are not in the ring.
                own_data: const u8 align 16 [p.own_rows, DATA_BYTES],
                /// `[own_rows, scale_bytes]` u8, their scales.
                own_scale: const u8 align 8 [p.own_rows, f.format.scale_bytes() as u32],
                /// `[tokens, entry_rows]` entries of the query's request; -1 = none.
                selected: const i32 [p.tokens, if f.keys() == AttendedKeys::List { p.entry_rows } else { 0 }],
                /// `[slots, max_blocks]` block of the planes for each block of a request; -1 = none.
                table: const i32 [p.slots, p.max_blocks],
                /// `[num_blocks * entries_per_block, 576]` u8, the data plane of the entries.
                entry_data: const u8 align 16 [p.num_blocks, 1 << p.entries_log2, DATA_BYTES],
                /// `[num_blocks * entries_per_block, scale_bytes]` u8, the scale plane of the entries.
                entry_scale: const u8 align 8 [p.num_blocks, 1 << p.entries_log2, f.format.scale_bytes() as u32],
                /// `[skipped + tokens, heads, 512]` BF16; padding and the first rows untouched.
                out: mut u16 align 16 [end(p.skipped, p.tokens), p.heads, HEAD_DIM],
                /// `[skipped + tokens, lse_heads]` f32: natural logarithm of the softmax's denominator, the sink included; padding
                /// and the first rows untouched.
                lse: mut f32 [end(p.skipped, p.tokens), p.lse_heads],
                /// `[tokens, groups, pieces, 64, 512]` f32, if a query's keys have several pieces: splits, or halves of splits if
                /// `key_halves` is 2. A group is 64 heads, the last perhaps fewer. The output of each piece, not divided by its
                /// denominator where it is a half. Heads and channels are in an order of the kernel's own.
                split_out: mut f32 align 16 [p.tokens, several(pieces(&p, f), groups(&p)), pieces(&p, f), attention::HEADS, HEAD_DIM],
                /// `[tokens, groups, pieces, denominators, 64]` f32, if there are several pieces. Not spread, one value: log2
                /// of the denominator of the softmax of the piece, without the sink. Spread, two values for each of 8 blocks: for a
                /// whole split that and an unused one; for half a split the base of its weights and their sum.
                split_softmax: mut f32 [p.tokens, several(pieces(&p, f), groups(&p)), pieces(&p, f), f.denominators(), attention::HEADS],
                /// `[tokens, groups, blocks of a cluster]` u32, if there are several pieces: those that are done, which count
                /// `channel_halves` times where they are not spread; 0 between launches.
                arrivals: mut u32 [p.tokens, several(pieces(&p, f), groups(&p)), f.cluster()],
                /// `[tokens, pieces, groups, 24, 2304]` u32, if each is spread over eight blocks: of each tile of keys the weights
                /// `[64, 64]` BF16, in the order of the fragments of A of `wgmma`, then two f32 sums of them for each of 128 threads.
                exchange: mut u32 align 16 [if f.is_spread() { p.tokens } else { 0 }, pieces(&p, f), groups(&p), attention::spread::CLUSTER_WORDS],
                /// `[1]` count of slots past the last, of queries whose position is negative, that do not fit the own rows or that see
                /// more entries than `entry_rows` without a list, and of entries that the query does not see or whose block is missing.
                faults: mut u32 [1];
                AttendParams
            )
            { block: if f.is_spread() { attention::spread::BLOCK_THREADS } else { attention::BLOCK_THREADS }, min_blocks: 1,
              shared: if f.is_spread() { attention::spread::SHARED_BYTES } else { attention::SHARED_BYTES }, min_sm: 90, cluster: f.cluster(),
              grid: [attend_blocks(&p, f), if matches!(f.form, AttendForm::Whole(_)) { 1 } else { groups(&p) }] }
            bodies {
                [AttendKernel { format: MainFormat::Ue8m0, form: AttendForm::Whole(AttendedKeys::Window) }] =>
                    attend_window_ue8m0: attention::attend::<row::Ue8m0Row, attention::Window>,
                [AttendKernel { format: MainFormat::Ue8m0, form: AttendForm::Whole(AttendedKeys::List) }] =>
                    attend_list_ue8m0: attention::attend::<row::Ue8m0Row, attention::List>,
                [AttendKernel { format: MainFormat::Ue8m0, form: AttendForm::Whole(AttendedKeys::All) }] =>
                    attend_all_ue8m0: attention::attend::<row::Ue8m0Row, attention::All>,
                [AttendKernel { format: MainFormat::F32, form: AttendForm::Whole(AttendedKeys::Window) }] =>
                    attend_window_f32: attention::attend::<row::F32Row, attention::Window>,
                [AttendKernel { format: MainFormat::F32, form: AttendForm::Whole(AttendedKeys::List) }] =>
                    attend_list_f32: attention::attend::<row::F32Row, attention::List>,
                [AttendKernel { format: MainFormat::F32, form: AttendForm::Whole(AttendedKeys::All) }] =>
                    attend_all_f32: attention::attend::<row::F32Row, attention::All>,
                [AttendKernel { format: MainFormat::Ue8m0, form: AttendForm::Consecutive }] =>
                    attend_consecutive_ue8m0: attention::consecutive::attend::<row::Ue8m0Row>,
                [AttendKernel { format: MainFormat::F32, form: AttendForm::Consecutive }] =>
                    attend_consecutive_f32: attention::consecutive::attend::<row::F32Row>,
                [AttendKernel { format: MainFormat::Ue8m0, form: AttendForm::Spread(AttendedKeys::Window) }] =>
                    attend_spread_window_ue8m0: attention::spread::attend::<row::Ue8m0Row, attention::Short<attention::Window>>,
                [AttendKernel { format: MainFormat::Ue8m0, form: AttendForm::Spread(AttendedKeys::List) }] =>
                    attend_spread_list_ue8m0: attention::spread::attend::<row::Ue8m0Row, attention::Short<attention::List>>,
                [AttendKernel { format: MainFormat::Ue8m0, form: AttendForm::SpreadSplits(ManyEntries::List) }] =>
                    attend_spread_splits_list_ue8m0: attention::spread::attend::<row::Ue8m0Row, attention::List>,
                [AttendKernel { format: MainFormat::Ue8m0, form: AttendForm::Spread(AttendedKeys::All) }] =>
                    attend_spread_all_ue8m0: attention::spread::attend::<row::Ue8m0Row, attention::Short<attention::All>>,
                [AttendKernel { format: MainFormat::Ue8m0, form: AttendForm::SpreadSplits(ManyEntries::All) }] =>
                    attend_spread_splits_all_ue8m0: attention::spread::attend::<row::Ue8m0Row, attention::All>,
                [AttendKernel { format: MainFormat::F32, form: AttendForm::Spread(AttendedKeys::Window) }] =>
                    attend_spread_window_f32: attention::spread::attend::<row::F32Row, attention::Short<attention::Window>>,
                [AttendKernel { format: MainFormat::F32, form: AttendForm::Spread(AttendedKeys::List) }] =>
                    attend_spread_list_f32: attention::spread::attend::<row::F32Row, attention::Short<attention::List>>,
                [AttendKernel { format: MainFormat::F32, form: AttendForm::SpreadSplits(ManyEntries::List) }] =>
                    attend_spread_splits_list_f32: attention::spread::attend::<row::F32Row, attention::List>,
                [AttendKernel { format: MainFormat::F32, form: AttendForm::Spread(AttendedKeys::All) }] =>
                    attend_spread_all_f32: attention::spread::attend::<row::F32Row, attention::Short<attention::All>>,
                [AttendKernel { format: MainFormat::F32, form: AttendForm::SpreadSplits(ManyEntries::All) }] =>
                    attend_spread_splits_all_f32: attention::spread::attend::<row::F32Row, attention::All>,
            }
        } }
    };
}
