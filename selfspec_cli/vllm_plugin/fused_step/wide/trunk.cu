// ---- the warps that copy -----------------------------------------------------------------------------------------
// Records of a product that lie side by side in memory and in a slot.
struct Run {
    int from, count;  // the first one's number in a layer
    u32 to;           // bytes from the slot's beginning
};
// Strips that the block has tiles of.
__device__ __forceinline__ int strips_of(const Work& work) {
    return (work.tiles.first + work.tiles.count - 1) / STRIP - work.tiles.first / STRIP + 1;
}
// number-th run of `groups` groups of columns from `first` on: a tile's groups, or a group's tiles that are of one strip.
__device__ __forceinline__ Run run_of(const Work& work, const Strides& strides, int number, int first, int groups) {
    const int column = work.groups.first + first;
    if (!work.strips) {
        return {work.first + (work.tiles.first + number) * work.columns + column, groups, u32(number * strides.tile)};
    }
    const int strip = work.tiles.first / STRIP + number / groups, group = number % groups;
    const int begin = max(work.tiles.first, strip * STRIP), end = min(work.tiles.first + work.tiles.count, strip * STRIP + STRIP);
    const int from = work.first + (strip * work.columns + column + group) * STRIP + begin % STRIP;
    return {from, end - begin, u32(group * strides.group + (begin - work.tiles.first) * RECORD)};
}

// The block's weights into its ring, as fast as slots become free. By one warp, whose lanes copy runs in turn.
__device__ __forceinline__ void copy_weights(const Arguments& a, const Lane& lane, Weights weights, int block) {
    const u64 policy = read_once();
#pragma unroll 1
    for (int n = 0; n < LAYERS * 4; n++) {
        const Work work = work_of(n % 4, block);
        if (work.tiles.count == 0) continue;
        const char* const layer = a.weights + u64(n / 4) * LAYER_BYTES;
        const Strides strides = strides_of(work);
        const int most = slabs_together(work) * SLAB;
#pragma unroll 1
        for (int first = 0; first < work.groups.count; first += most) {
            const int groups = min(most, work.groups.count - first);
            u32 barrier;
            const u32 to = weights.fill(groups * work.tiles.count * RECORD, barrier, lane.id);
            __syncwarp();  // a lane without a run would not notice that the slot is filled and emptied again
            const int runs = work.strips ? groups * strips_of(work) : work.tiles.count;
#pragma unroll 1
            for (int number = lane.id; number < runs; number += 32) {
                const Run run = run_of(work, strides, number, first, groups);
                copy_async(to + run.to, layer + u64(run.from) * RECORD, run.count * RECORD, barrier, policy);
            }
        }
    }
}

// Keys of the block's items on their way from memory before their layer begins: while `down` of the layer before goes on.
// By one warp.
__device__ __forceinline__ void copy_keys(
    const Arguments& a, const Lane& lane, const u64* bases, const Item* items, int count
) {
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; layer++) {
        if (layer > 0 && lane.id == 0) wait_for(a, bases, GATE_UP_PHASE, layer);
        __syncwarp();
        prefetch_keys(a, lane, items, count, layer);
    }
}

// Each product's activations, as soon as they are there: `ready` tells the others first. By one thread.
__device__ __forceinline__ void copy_inputs(const Arguments& a, Inputs inputs, int block, const u64* bases, u32 ready) {
#pragma unroll 1
    for (int n = 0; n < LAYERS * 4; n++) {
        const int layer = n / 4, phase = n % 4;
        const Work work = work_of(phase, block);
        if (work.tiles.count == 0) continue;
        const int before = phase == QKV_PHASE    ? FINISH_PHASE
                           : phase == O_PHASE    ? ATTENTION_PHASE
                           : phase == DOWN_PHASE ? GATE_UP_PHASE
                                                 : O_PHASE;
        // This block's one is among those that are waited for. It was added after all warps had read their sums, which lie
        // where copies go. (compute-sanitizer's racecheck reports them: it cannot follow an order that goes through memory.)
        wait_for(a, bases, before, layer + 1);
        fence_copies();  // other blocks' stores, and what this block read and stored where copies go
        barrier_arrive(ready);
        const u64 place = phase == O_PHASE ? IN_ATTENDED : phase == DOWN_PHASE ? IN_GATED : IN_NORMED;
        const char* from = a.memory + place + u64(work.groups.first) * GROUP_BYTES;
#pragma unroll 1
        for (int first = 0; first < work.groups.count; first += SLAB) {
            const u32 bytes = min(SLAB, work.groups.count - first) * GROUP_BYTES;
            u32 barrier;
            const u32 to = inputs.fill(bytes, barrier, 0);
            copy_async(to, from, bytes, barrier);
            from += bytes;
        }
    }
}

// ---- what becomes of sums ----------------------------------------------------------------------------------------
// Norms' factors of all tokens into factors [TOKENS], four lanes a token. Read them after the next `sync_multipliers`.
__device__ __forceinline__ void norm_factors(const Arguments& a, const Lane& lane, float* factors) {
    constexpr int FOURS = TILES_HIDDEN / 4;  // loads of four for a token
#pragma unroll 1
    for (int n = lane.thread(); n < TOKENS * 4; n += MULTIPLIERS) {
        const float4* from = (const float4*)(a.memory + IN_SQUARES) + n / 4 * FOURS + n % 4;
        float all = 0.f;
#pragma unroll 8
        for (int i = 0; i < COUNT_OF(FOURS, 4); i++) {
            if (FOURS % 4 != 0 && n % 4 + i * 4 >= FOURS) break;
            const float4 some = load_relaxed(from + i * 4);
            all += some.x + some.y + some.z + some.w;
        }
        all += __shfl_xor_sync(FULL, all, 1);
        all += __shfl_xor_sync(FULL, all, 2);
        if (n % 4 == 0) factors[n / 4] = rsqrtf(all / HIDDEN + EPSILON);
    }
}

// Four columns of a token more for the residual. Stores them times the weights of norm number `norm` for the next
// product, and the sum of squares of the tile's 16 columns, which four neighbouring lanes have together.
__device__ __forceinline__ void add_to_residual(
    const Arguments& a, char* shared, const Share& tiles, int tile, int token, int row, const float4& more, int norm
) {
    float4* const residual = (float4*)(shared + AT_RESIDUAL + (tile * TOKENS + token) * 64 + row * 4);
    float4 x = *residual;
    x.x += more.x, x.y += more.y, x.z += more.z, x.w += more.w;
    *residual = x;
    float square = x.x * x.x + x.y * x.y + x.z * x.z + x.w * x.w;
    square += __shfl_xor_sync(FULL, square, 1);
    square += __shfl_xor_sync(FULL, square, 2);
    if (token >= a.tokens) return;
    const uint2 weight = *(const uint2*)(shared + AT_NORMS + (norm * OWNED + tile) * 32 + row * 2);
    x.x *= low(weight.x), x.y *= high(weight.x), x.z *= low(weight.y), x.w *= high(weight.y);
    const int number = tiles.first + tile;
    *(u64*)(a.memory + IN_NORMED + place_in_fragments(number * 16 + row, token)) = pack_four(x);
    if (row == 0) ((float*)(a.memory + IN_SQUARES))[token * TILES_HIDDEN + number] = square;
}

// `item`-th of a tile's 64 quarters of a token's sums: tile, token of 16, first row.
struct Quarter {
    int tile, token, row;
    __device__ __forceinline__ Quarter(int item) : tile(item / 64), token(item / 4 % 16), row(item % 4 * 4) {}
};

// What a block makes of its sums of 16 tokens from token 16 * pass on.
__device__ __forceinline__ void use_sums(
    const Arguments& a, const Lane& lane, char* shared, const float* sums, const Work& work, int phase, int layer, int pass
) {
    const float* const factors = (const float*)(shared + AT_FACTORS) + pass * 16;
    const int tiles = work.tiles.count;
    if (phase == GATE_UP_PHASE) {  // rows 0 to 7 of a tile are gates, the others what they gate
#pragma unroll 1
        for (int n = lane.thread(); n < tiles * 32; n += MULTIPLIERS) {
            const int tile = n / 32, token = n / 2 % 16, row = n % 2 * 4;
            const float4 gates = add_splits(sums, work, tile, token, row), ups = add_splits(sums, work, tile, token, row + 8);
            if (pass * 16 + token >= a.tokens) continue;
            const float factor = factors[token];
            const float x[4] = {gates.x, gates.y, gates.z, gates.w}, y[4] = {ups.x, ups.y, ups.z, ups.w};
            float z[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float gate = x[i] * factor;
                z[i] = __fdividef(gate, 1.f + exp2_fast(-LOG2E * gate)) * (y[i] * factor);
            }
            const u32 place = place_in_fragments((work.tiles.first + tile) * 8 + row, pass * 16 + token);
            *(u64*)(a.memory + IN_GATED + place) = pack_four(make_float4(z[0], z[1], z[2], z[3]));
        }
        return;
    }
#pragma unroll 1
    for (int n = lane.thread(); n < tiles * 64; n += MULTIPLIERS) {
        const Quarter at(n);
        float4 x = add_splits(sums, work, at.tile, at.token, at.row);
        const int token = pass * 16 + at.token, tile = work.tiles.first + at.tile;
        if (phase == O_PHASE) {
            add_to_residual(a, shared, work.tiles, at.tile, token, at.row, x, layer * 2 + 1);
        } else if (phase == DOWN_PHASE) {
            const int place = ((work.slice * TILES_HIDDEN + tile) * TOKENS + token) * 16 + at.row;
            if (token < a.tokens) *(float4*)(a.memory + IN_SUMS + place * 4ll) = x;
        } else {
            const float factor = factors[at.token];
            x.x *= factor, x.y *= factor, x.z *= factor, x.w *= factor;
#if BIAS
            const uint2 bias = *(const uint2*)(shared + AT_BIAS + (layer * BIASED + at.tile) * 32 + at.row * 2);
            x.x += low(bias.x), x.y += high(bias.x), x.z += low(bias.y), x.w += high(bias.y);
#endif
            const uint2 four = make_uint2(pack(x.x, x.y), pack(x.z, x.w));
            if (token < a.tokens) *(uint2*)(a.memory + IN_QKV + (token * QKV + tile * 16 + at.row) * 2) = four;
        }
    }
}

// `down`'s slices are added to the residual of the block's columns, for the norm before the next layer or the last one.
__device__ __forceinline__ void finish(const Arguments& a, const Lane& lane, char* shared, const Share& tiles, int layer) {
    constexpr int AT_ONCE = DOWN_SLICES <= 16 ? DOWN_SLICES : 8;  // loads on their way
#pragma unroll 1
    for (int n = lane.thread(); n < tiles.count * TOKENS * 4; n += MULTIPLIERS) {
        const int tile = n / (TOKENS * 4), token = n / 4 % TOKENS, row = n % 4 * 4;
        const float4* from = (const float4*)(a.memory + IN_SUMS) + ((tiles.first + tile) * TOKENS + token) * 4 + row / 4;
        float4 all = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll AT_ONCE
        for (int slice = 0; slice < DOWN_SLICES; slice++) {
            const float4 some = load_relaxed(from + u64(slice) * (TOKENS * HIDDEN / 4));
            all.x += some.x, all.y += some.y, all.z += some.z, all.w += some.w;
        }
        add_to_residual(a, shared, tiles, tile, token, row, all, layer * 2 + 2);
    }
}

// ---- before the first layer and after the last -------------------------------------------------------------------
// Small weights of all layers for the block's rows go to shared memory, because a load from memory would wait behind the
// stream of weights. Sixteen rows are two loads.
__device__ __forceinline__ void load_small_weights(const Arguments& a, char* shared, const Share& owned, const Share& biased) {
#pragma unroll 2
    for (int n = threadIdx.x; n < (2 * LAYERS + 1) * owned.count * 2; n += MULTIPLIERS) {
        const int norm = n / (owned.count * 2), part = n % (owned.count * 2);
        const u16* from = norm == 2 * LAYERS ? a.final_norm : a.norms + norm * HIDDEN;
        *(uint4*)(shared + AT_NORMS + norm * OWNED * 32 + part * 16) = *(const uint4*)(from + owned.first * 16 + part * 8);
    }
#if BIAS
#pragma unroll 2
    for (int n = threadIdx.x; n < LAYERS * biased.count * 2; n += MULTIPLIERS) {
        const int layer = n / (biased.count * 2), part = n % (biased.count * 2);
        const u16* from = a.bias + layer * QKV + biased.first * 16 + part * 8;
        *(uint4*)(shared + AT_BIAS + layer * BIASED * 32 + part * 16) = *(const uint4*)from;
    }
#endif
}

// Cosines and sines of the items' tokens.
__device__ __forceinline__ void load_turns(const Arguments& a, char* shared, const Item* items, int count) {
    float* const turns = (float*)(shared + AT_ROPE);
#pragma unroll 1
    for (int n = threadIdx.x; n < count * DIM; n += MULTIPLIERS) {
        const long long at = a.positions[items[n / DIM].token] * DIM + n % DIM;
#if ROPE_FLOAT
        turns[n] = ((const float*)a.rope)[at];
#else
        turns[n] = plain(((const u16*)a.rope)[at]);
#endif
    }
}

// The residual before the first layer: the block's columns of all tokens' embeddings.
__device__ __forceinline__ void embed(const Arguments& a, char* shared, const Share& tiles) {
#pragma unroll 1
    for (int n = threadIdx.x; n < tiles.count * TOKENS * 4; n += MULTIPLIERS) {
        const int tile = n / (TOKENS * 4), token = n / 4 % TOKENS, row = n % 4 * 4;
        uint2 four = make_uint2(0, 0);
        if (token < a.tokens)
            four = *(const uint2*)(a.embedding + (long long)a.ids[token] * HIDDEN + (tiles.first + tile) * 16 + row);
        *(float4*)(shared + AT_RESIDUAL + (tile * TOKENS + token) * 64 + row * 4) = make_float4(0.f, 0.f, 0.f, 0.f);
        const float4 x = make_float4(low(four.x), high(four.x), low(four.y), high(four.y));
        add_to_residual(a, shared, tiles, tile, token, row, x, 0);
    }
}

// Normed hidden states of the block's tokens.
__device__ __forceinline__ void store_outputs(const Arguments& a, const float* factors, int block) {
#pragma unroll 1
    for (int token = block; token < a.tokens; token += NB) {
        const float factor = factors[token];
#pragma unroll 1
        for (int column = threadIdx.x * 4; column < HIDDEN; column += MULTIPLIERS * 4) {
            const float4 x = unpack_four(load_relaxed((const u64*)(a.memory + IN_NORMED + place_in_fragments(column, token))));
            *(uint2*)(a.out + token * HIDDEN + column) =
                make_uint2(pack(x.x * factor, x.y * factor), pack(x.z * factor, x.w * factor));
        }
    }
}

// ---- the trunk ---------------------------------------------------------------------------------------------------
// What the block shares, beside the rings.
struct Block {
    char* shared;
    const u64* bases;  // of counters
    u32 ready;         // barrier: activations of the next product are there
    int number;
};

// Until bases and items are in shared memory: all warps but those that need none.
__device__ __forceinline__ void sync_start() { synchronize<2, MULTIPLIERS + 64>(); }

// The block's items in a layer. Keys of the first are read before qkv is waited for.
__device__ __forceinline__ void attend_to_items(
    const Arguments& a, const Block& block, const Lane& lane, const Item* items, int count, int layer, float* sums
) {
    const u16* const cache = (const u16*)a.caches[layer];
    const float* const turns = (const float*)(block.shared + AT_ROPE);
#pragma unroll 1
    for (int n = 0; n < count; n++) {
        const Item& item = items[n];
        const int first = item.first + lane.warp;
        Keys keys;
        if (first < item.first + item.tiles)
            read_keys(keys, lane, a, cache, place_of_row(lane, a, item, first), item.length - 1 - first * 8);
        if (n == 0) {
            if (threadIdx.x == 0) wait_for(a, block.bases, QKV_PHASE, layer + 1);
            sync_multipliers();
            STAMP(a, layer, 13);
        }
        attend(lane, a, item, layer, keys, turns + n * DIM, block.shared, sums);
    }
}

// The warps that multiply, through all phases.
__device__ __forceinline__ void compute(const Arguments& a, const Block& block, Weights weights, Inputs inputs) {
    char* const shared = block.shared;
    const Lane lane = Lane::of(threadIdx.x);
    const Share owned = work_of(O_PHASE, block.number).tiles;  // tiles of the residual
    Item* const items = (Item*)(shared + AT_ITEMS);
    load_small_weights(a, shared, owned, work_of(QKV_PHASE, block.number).tiles);
    sync_start();
    const int count = *(const int*)(shared + AT_LAST);
    embed(a, shared, owned);
    end_phase(a, FINISH_PHASE);
    load_turns(a, shared, items, count);
    float* const factors = (float*)(shared + AT_FACTORS);
    float* const area = (float*)(shared + AT_AREA);
    u32 ready_parity = 0;
#pragma unroll 1
    for (int layer = 0; layer < LAYERS; layer++) {
#pragma unroll 1
        for (int phase = 0; phase < 4; phase++) {
            const Lane lane = Lane::of(threadIdx.x);
            if (phase == O_PHASE) {
                STAMP(a, layer, 12);
                attend_to_items(a, block, lane, items, count, layer, area);
                end_phase(a, ATTENTION_PHASE);
                STAMP(a, layer, 14);
            }
            const Work work = work_of(phase, hidden_from_compiler(block.number));
            if (work.tiles.count > 0) {
                const Role role = role_of(lane, work);
                Sums sums;
                barrier_wait(block.ready, ready_parity);
                ready_parity ^= 1;
                STAMP(a, layer, phase * 3);
                if (phase == QKV_PHASE || phase == GATE_UP_PHASE) norm_factors(a, lane, factors);
                product(weights, inputs, lane, work, role, sums);
                STAMP(a, layer, phase * 3 + 1);
#pragma unroll 1
                for (int pass = 0; pass * 16 < a.tokens; pass++) {
                    sync_multipliers();  // copies of activations, and sums of the pass before, have been read
                    store_sums(area, pass, lane, work, role, sums);
                    sync_multipliers();
                    use_sums(a, lane, shared, area, work, phase, layer, pass);
                }
            }
            end_phase(a, phase);
            STAMP(a, layer, phase * 3 + 2);
        }
        if (owned.count > 0) {
            if (threadIdx.x == 0) wait_for(a, block.bases, DOWN_PHASE, layer + 1);
            sync_multipliers();
            STAMP(a, layer, 15);
            finish(a, Lane::of(threadIdx.x), shared, owned, layer);
        }
        end_phase(a, FINISH_PHASE);
        STAMP(a, layer, 16);
    }
    if (block.number < a.tokens) {
        if (threadIdx.x == 0) wait_for(a, block.bases, FINISH_PHASE, LAYERS + 1);
        sync_multipliers();
        norm_factors(a, lane, factors);
        sync_multipliers();
        store_outputs(a, factors, block.number);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) draft_trunk_wide(const __grid_constant__ Arguments a) {
    SHARED_MEMORY(shared);
    u64* const bases = (u64*)(shared + AT_BASES);
    const u32 barriers = address(shared + AT_BARRIERS), ready = barriers + (2 * WEIGHT_SLOTS + 2 * INPUT_SLOTS) * 8;
    Weights weights(shared, barriers);
    Inputs inputs(shared + AT_AREA, barriers + 2 * WEIGHT_SLOTS * 8);
    if (threadIdx.x == 0) {
        weights.init(), inputs.init(), barrier_init(ready, 1);
        fence_barriers();
    }
    __syncthreads();
    const Block block = {shared, bases, ready, int(blockIdx.x)};
    if (threadIdx.x < MULTIPLIERS) {
        more_registers<REGISTERS_TO_MULTIPLY>();
        compute(a, block, weights, inputs);
    } else {
        fewer_registers<REGISTERS_TO_COPY>();
        const Lane lane = Lane::of(threadIdx.x - MULTIPLIERS);
        if (lane.warp == 0) {
            copy_weights(a, lane, weights, block.number);
        } else if (lane.warp == 1) {
            if (lane.id < PHASES) bases[lane.id] = base_of(a, lane.id);
            sync_start();
            if (lane.id == 0) copy_inputs(a, inputs, block.number, bases, ready);
        } else if (lane.warp == 2) {
            Item* const items = (Item*)(shared + AT_ITEMS);
            const int count = list_items(a, lane, block.number, items);
            if (lane.id == 0) *(int*)(shared + AT_LAST) = count;
            sync_start();
            copy_keys(a, lane, bases, items, count);
        }
    }
}
