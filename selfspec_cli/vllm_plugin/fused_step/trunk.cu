// ---- the trunk -------------------------------------------------------------------------------------------------
struct Rows {
    float2 of[LANE_TOKENS];  // rows `row` and `row + 1` of each token of a token group
};
// Sums of all warps. area: of the first warp's.
__device__ __forceinline__ Rows add_warps(const char* area, int tile, int token_group, int row) {
    const float* from = (const float*)area + tile * TILE_SUMS + place_of_sums(token_group, row);
    Rows chains[2] = {};  // an addition waits for the one before it: two chains take half of the time
#pragma unroll
    for (int w = 0; w < WARPS; w++, from += AREA_WARP / 4) {
        Rows& all = chains[w % 2];
        if (LANE_TOKENS == 1) {
            float2 some = *(const float2*)from;
            all.of[0].x += some.x, all.of[0].y += some.y;
        } else {
            float4 some = *(const float4*)from;  // token by token within a row
            all.of[0].x += some.x, all.of[LANE_TOKENS - 1].x += some.y;
            all.of[0].y += some.z, all.of[LANE_TOKENS - 1].y += some.w;
        }
    }
#pragma unroll
    for (int t = 0; t < LANE_TOKENS; t++) {
        chains[0].of[t].x += chains[1].of[t].x, chains[0].of[t].y += chains[1].of[t].y;
    }
    return chains[0];
}

// Of a token whose sum of squares is in [WARPS] parts.
__device__ __forceinline__ float norm_factor(const float* squares) {
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w += 4) {
        float4 some = *(const float4*)(squares + w);
        all += (some.x + some.y) + (some.z + some.w);
    }
    return rsqrtf(fmaf(all, 1.f / HIDDEN, EPSILON));
}

// Two columns of what comes before down, one of 16 lanes that round theirs together to bytes.
__device__ __forceinline__ void store_gated(
    const Arguments& a, u32 flag, u32 thread, int token, int column, float factor, float2 gate, float2 up
) {
    gate.x *= factor, gate.y *= factor, up.x *= factor, up.y *= factor;
    float x = __fdividef(gate.x, 1.f + exp2_fast(-LOG2E * gate.x)) * up.x;
    float y = __fdividef(gate.y, 1.f + exp2_fast(-LOG2E * gate.y)) * up.y;
    const u32 lanes = 0xffffu << (thread & 16);
    float most = fmaxf(fabsf(x), fabsf(y));
#pragma unroll
    for (int d = 1; d < 16; d *= 2) most = fmaxf(most, __shfl_xor_sync(lanes, most, d));
    const float magic = 12582912.f, inverse = most > 0.f ? __fdividef(127.f, most) : 0.f;
    u32 pair = __byte_perm(__float_as_uint(fmaf(x, inverse, magic)), __float_as_uint(fmaf(y, inverse, magic)), 0x40);
    pair = __byte_perm(pair, __shfl_xor_sync(lanes, pair, 1), 0x5410);
    if (!(thread & 1)) store_flagged(a.words + PK_GATED + (token * INTER + column) / 4, pair, flag);
    if (thread % 16 == 0)
        store_flagged(a.words + PK_FACTOR + (token * INTER + column) / 32, __float_as_uint(factor_of(most, column)), flag);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) draft_trunk(const __grid_constant__ Arguments a) {
    SHARED_MEMORY(shared);
    const u32 block = blockIdx.x, thread = threadIdx.x;
    Lane lane;
    lane.warp = thread / 32, lane.id = thread % 32, lane.row = lane.id / 4;
    lane.token_group = (lane.id & 3) < TOKEN_GROUPS ? (lane.id & 3) : 0;
    lane.column = min(LANE_TOKENS == 1 ? lane.row / 2 : lane.row, NT - 1) * 64 + (lane.id & 3) * 16;
    char* const areas = shared + AT_AREA;
    lane.bytes = areas + lane.warp * AREA_WARP, lane.factors = shared + AT_FACTORS + lane.warp * FACTORS_WARP;
    int2* const plan = (int2*)(shared + AT_PLAN);  // first tile and tiles of qkv, of the residual's rows, of gate and up
    if (thread < 6) ((int*)plan)[thread] = a.plan[block * 6 + thread];
    __syncthreads();
    const Share hidden = share_of(GROUPS_H, lane.warp);
    const u32 base = *(volatile u32*)a.launches * (LAYERS + 1);
    // All that is read from memory by single loads comes first: it would wait behind the weights.
    float* residual = (float*)(shared + AT_RESIDUAL);  // [tiles][NT][16]
#pragma unroll 1
    for (int n = thread; n < plan[1].y * 8 * NT; n += THREADS) {
        int tile = n / (8 * NT), token = n / 8 % NT, row = n % 8 * 2, out = (plan[1].x + tile) * 16 + row;
        u32 pair = *(const u32*)(a.embedding + (long long)a.ids[token] * HIDDEN + out);
        residual[(tile * NT + token) * 16 + row] = low(pair), residual[(tile * NT + token) * 16 + row + 1] = high(pair);
        store_flagged(a.words + PK_X + (token * HIDDEN + out) / 2, pair, base);
    }
    int most = 1, *const all_splits = (int*)(shared + AT_SPLITS);  // of tokens
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const int splits = splits_for(a.lengths[n]);
        most = max(most, splits);
        if (thread == n) all_splits[n] = splits;
    }
    const bool direct = most > 1 && most <= DIRECT;  // readers add up all tokens' parts themselves
    Item* const item = (Item*)(shared + AT_ITEM);
    if (thread == 0) *item = item_of(a, block);
    __syncthreads();
    if (item->token >= 0) {
        const Tiles keys = tiles_of(lane, *item);
        const long long first = keys.tile < keys.all ? offset_of(lane, a, *item, keys.tile) : 0;
        *first_place(lane, shared) = first;
        prefetch_keys(lane, a, *item, first, 0);
    }
#pragma unroll 1
    for (int n = thread; n < NT * DIM; n += THREADS) {
        long long at = a.positions[n / DIM] * DIM + n % DIM;
#if ROPE_FLOAT
        ((float*)(shared + AT_ROPE))[n] = ((const float*)a.rope)[at];
#else
        ((float*)(shared + AT_ROPE))[n] = plain(((const u16*)a.rope)[at]);
#endif
    }
    NormWeights norm_weights;  // of the norm that is next
    norm_weights.read(lane, a.norms, hidden);
#if BIAS
    u32 bias = 0;  // of the layer that is next, for this thread's first rows
    const bool biased = thread < plan[0].y * 8 * TOKEN_GROUPS;
    const u16* bias_at = a.bias + (plan[0].x + thread / (8 * TOKEN_GROUPS)) * 16 + thread % 8 * 2;
    if (biased) bias = *(const u32*)bias_at;
#endif
    u32* const chunks = (u32*)(shared + AT_CHUNKS) + lane.warp * CHUNKS;
    u32* end = list_chunks(chunks, 0, GROUPS_H, plan[0].x, plan[0].y, hidden);
    end = list_chunks(end, FIRST_O, GROUPS_O, plan[1].x, plan[1].y, share_of(GROUPS_O, lane.warp));
    end = list_strips(end, FIRST_GATE_UP, GROUPS_H, plan[2].x, plan[2].y, hidden);
    end = list_chunks(end, FIRST_DOWN, GROUPS_I, plan[1].x, plan[1].y, share_of(GROUPS_I, lane.warp));
    __syncthreads();
    Ring ring;
    ring.begin(a.weights, chunks, end - chunks, shared + lane.warp * SLOTS * CHUNK,
               address(shared + AT_BARRIERS) + lane.warp * SLOTS * 8, lane.id);
    float* squares = (float*)(shared + AT_SQUARES);
    for (int layer = 0; layer < LAYERS; layer++) {
        const u32 flag = base + layer + 1;
        const bool ends = layer == LAYERS - 1;
#pragma unroll 1
        for (int phase = 0; phase < 4; phase++) {
            // ---- what the product reads
            const int columns = phase == 1 ? GROUPS_O : phase == 3 ? GROUPS_I : GROUPS_H;
            const Share share = share_of(columns, hidden_from_compiler(lane.warp));
            const int2 planned = plan[phase & 1 ? 1 : phase];
            const int first = planned.x, tiles = planned.y;
            if (phase == 0 || phase == 2) {
                const u64* words = a.words + (phase ? PK_MID : PK_X);
                load_and_quantize<HIDDEN, true>(lane, words, phase ? flag : flag - 1, norm_weights, share, squares);
                if (!(ends && phase)) norm_weights.read(lane, a.norms + (layer * 2 + phase / 2 + 1) * HIDDEN, share);
            } else if (phase == 3) {
                if (tiles > 0) load_quantized(lane, a, flag, share);
            } else {
                if (item->token >= 0) {
                    const Item mine = *item;
                    attend(lane, a, mine, flag, layer, direct, shared, (float*)areas);
                }
                if (direct) {
                    if (tiles > 0) load_parts_and_quantize(lane, a, all_splits, flag, share);
                } else {
                    if (most > 1) add_up(lane, a, all_splits, flag, block);
                    if (tiles > 0) load_and_quantize<HEADS_OUT, false>(lane, a.words + PK_ATT, flag, norm_weights, share, squares);
                }
            }
            char* const sums = areas + (phase == 1 ? SUMS_AT_O : phase == 3 ? SUMS_AT_DOWN : SUMS_AT_EVEN);  // of the first warp
            float* const mine = (float*)(sums + lane.warp * AREA_WARP);
            if (phase == 2) product_of_strips(ring, lane, tiles, share.groups, mine);
            else product(ring, lane, tiles, share.groups, mine);
            __syncthreads();
            // ---- what becomes of it
            if (phase == 0) {  // queries, keys, values
                for (int n = thread; n < tiles * 8 * TOKEN_GROUPS; n += THREADS) {
                    int tile = n / (8 * TOKEN_GROUPS), token_group = n / 8 % TOKEN_GROUPS, row = n % 8 * 2;
                    int out = (first + tile) * 16 + row;
                    Rows rows = add_warps(sums, tile, token_group, row);
#if BIAS
                    u32 some = n == thread ? bias : *(const u32*)(a.bias + layer * QKV + out);
#endif
#pragma unroll
                    for (int t = 0; t < LANE_TOKENS; t++) {
                        const int token = token_group * LANE_TOKENS + t;
                        if (token >= NT) break;
                        float factor = norm_factor(squares + token * WARPS);
                        float2 x = make_float2(rows.of[t].x * factor, rows.of[t].y * factor);
#if BIAS
                        x.x += low(some), x.y += high(some);
#endif
                        store_flagged(a.words + PK_QKV + (token * QKV + out) / 2, pack(x.x, x.y), flag);
                    }
                }
#if BIAS
                if (biased && !ends) bias = *(const u32*)(bias_at + (layer + 1) * QKV);
#endif
            } else if (phase == 2) {  // rows 0 to 7 of a tile are gates, the others what they gate
                // Sixteen lanes have 32 columns of a token, two each, and round them together.
                for (int n = thread; n < tiles * 4 * TOKEN_GROUPS; n += THREADS) {
                    int tile = n / (16 * TOKEN_GROUPS) * 4 + n % 16 / 4, token_group = n / 16 % TOKEN_GROUPS, row = n % 4 * 2;
                    Rows gates = add_warps(sums, tile, token_group, row), ups = add_warps(sums, tile, token_group, row + 8);
#pragma unroll
                    for (int t = 0; t < LANE_TOKENS; t++) {
                        const int token = token_group * LANE_TOKENS + t;
                        if (token >= NT) break;
                        store_gated(a, flag, thread, token, (first + tile) * 8 + row, norm_factor(squares + token * WARPS), gates.of[t], ups.of[t]);
                    }
                }
            } else {  // added to the residual
                u64* to = a.words + (phase == 3 ? PK_X : PK_MID);
                for (int n = thread; n < tiles * 8 * TOKEN_GROUPS; n += THREADS) {
                    int tile = n / (8 * TOKEN_GROUPS), token_group = n / 8 % TOKEN_GROUPS, row = n % 8 * 2;
                    Rows rows = add_warps(sums, tile, token_group, row);
#pragma unroll
                    for (int t = 0; t < LANE_TOKENS; t++) {
                        const int token = token_group * LANE_TOKENS + t;
                        if (token >= NT) break;
                        float2 x = rows.of[t], *left = (float2*)(residual + (tile * NT + token) * 16 + row);
                        x.x += left->x, x.y += left->y, *left = x;
                        store_flagged(to + (token * HIDDEN + (first + tile) * 16 + row) / 2, pack(x.x, x.y), flag);
                    }
                }
            }
            // Not before the words above, which other blocks wait for.
            if (phase == 1 && !ends && item->token >= 0) {
                const Item mine = *item;
                prefetch_keys(lane, a, mine, *first_place(lane, shared), layer + 1);
            }
            if (SHARED_AREA) __syncthreads();  // the next bytes lie where these sums are
        }
    }
    // ---- the last norm, a block for each token
    if (block < NT) {
        const u64* words = a.words + PK_X + block * HIDDEN / 2;
        float square = 0.f;
        __syncthreads();
        for (int n = thread; n < HIDDEN / 2; n += THREADS) {
            u32 pair = wait_word(words + n, base + LAYERS);
            square += low(pair) * low(pair) + high(pair) * high(pair);
        }
        __syncwarp();
        for (int d = 1; d < 32; d *= 2) square += __shfl_xor_sync(FULL, square, d);
        if (lane.id == 0) squares[lane.warp] = square;
        __syncthreads();
        float factor = norm_factor(squares);
        for (int n = thread; n < HIDDEN / 2; n += THREADS) {
            u32 pair = wait_word(words + n, base + LAYERS), weight = *(const u32*)(a.final_norm + 2 * n);
            *(u32*)(a.out + block * HIDDEN + 2 * n) = pack(low(pair) * factor * low(weight), high(pair) * factor * high(weight));
        }
        // Every block has read the count long ago: the last layer needed something of each.
        if (block == 0 && thread == 0) *a.launches = *(volatile u32*)a.launches + 1;
    }
}
