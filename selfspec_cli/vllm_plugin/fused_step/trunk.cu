// ---- the trunk -------------------------------------------------------------------------------------------------
__device__ __forceinline__ float2 added(const float* sums, int tiles, int tile, int token, int row) {
    float2 all = make_float2(0.f, 0.f);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        float2 some = *(const float2*)(sums + ((w * tiles + tile) * NT + token) * 16 + row);
        all.x += some.x, all.y += some.y;
    }
    return all;
}

__device__ __forceinline__ float norm_factor(const float* squares, int token) {
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += squares[w * NT + token];
    return rsqrtf(all / HIDDEN + EPSILON);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) draft_trunk(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(1024) char shared[];
    const u32 block = blockIdx.x, thread = threadIdx.x;
    Lane me;
    me.warp = thread / 32, me.lane = thread % 32, me.row = me.lane / 4, me.pair = (me.lane & 3) < NT ? (me.lane & 3) : 0;
    me.act = shared + AT_ACT + me.warp * ACT_WARP, me.fac = shared + AT_FAC + me.warp * FAC_WARP;
    const int* plan = a.plan + block * 6;
    const int q0 = plan[0], qn = plan[1], o0 = plan[2], on = plan[3], g0 = plan[4], gn = plan[5];
    const int part = me.warp ^ (me.warp / 4 & 1);  // uneven shares alternate; every scheduler gets some of both
    const int h0 = GROUPS_H * part / WARPS, hn = GROUPS_H * (part + 1) / WARPS - h0;
    const int c0 = GROUPS_O * part / WARPS, cn = GROUPS_O * (part + 1) / WARPS - c0;
    const int i0 = GROUPS_I * part / WARPS, in = GROUPS_I * (part + 1) / WARPS - i0;
    const u32 base = *(volatile u32*)a.launches * (LAYERS + 1);
    const char* stream = a.stream + a.offsets[block * WARPS + me.warp];
    // All that is read from memory by single loads comes first: it would wait behind the weights.
    float* residual = (float*)(shared + AT_RESIDUAL);  // [on][NT][16]
#pragma unroll 1
    for (int n = thread; n < on * 8 * NT; n += THREADS) {
        int tile = n / (8 * NT), token = n / 8 % NT, row = n % 8 * 2;
        u32 pair = *(const u32*)(a.embedding + (long long)a.ids[token] * HIDDEN + (o0 + tile) * 16 + row);
        residual[(tile * NT + token) * 16 + row] = low(pair), residual[(tile * NT + token) * 16 + row + 1] = high(pair);
        tell(a.words + PK_X + (token * HIDDEN + (o0 + tile) * 16 + row) / 2, pair, base);
    }
    bool direct = true;  // readers add up the parts of attention themselves
#pragma unroll
    for (int n = 0; n < NT; n++) direct &= splits_of(a.lengths[n]) <= DIRECT;
    const Unit unit = unit_of(me, a, block);
    long long slot = unit.token < 0 ? -1 : a.slots[unit.token];
    if (slot >= 0) slot = slot / PAGE * a.cache_block + slot % PAGE * a.cache_token + unit.head * a.cache_head;
    if (unit.token >= 0 && unit.length == 0) slot = -1;
#pragma unroll 1
    for (int n = thread; n < NT * DIM; n += THREADS) {
        long long at = a.positions[n / DIM] * DIM + n % DIM;
#if ROPE_FLOAT
        ((float*)(shared + AT_ROPE))[n] = ((const float*)a.rope)[at];
#else
        ((float*)(shared + AT_ROPE))[n] = plain(((const u16*)a.rope)[at]);
#endif
    }
    Gains gains, others;  // of the norm that is next, and of the one behind it
    gains.read(me, a.norms, h0, hn), others.read(me, a.norms + HIDDEN, h0, hn);
#if BIAS
    u32 bias = 0;  // of the layer that is next, for this thread's first rows
    const bool biased = thread < qn * 8 * NT;
    const u16* bias_at = a.bias + (q0 + thread / (8 * NT)) * 16 + thread % 8 * 2;
    if (biased) bias = *(const u32*)bias_at;
#endif
    if (unit.token >= 0) ask_for_keys(me, a, unit, 0);
    u16* sizes = (u16*)(shared + AT_SIZES) + me.warp * CHUNKS;
    u16* behind = sizes_of(sizes_of(sizes_of(sizes_of(sizes, qn, hn), on, cn), gn, hn), on, in);
    __syncthreads();
    Ring ring;
    ring.begin(stream, sizes, behind - sizes, shared + me.warp * SLOTS * CHUNK,
               address(shared + AT_BARRIERS) + me.warp * SLOTS * 8, me.lane);
    float *sums = (float*)(shared + AT_SUMS), *more_sums = sums + WARPS * TILES * NT * 16;
    float* squares = (float*)(shared + AT_SQUARES);
    for (int layer = 0; layer < LAYERS; layer++) {
        const u32 flag = base + layer + 1;
        const bool ends = layer == LAYERS - 1;
#pragma unroll 1
        for (int phase = 0; phase < 4; phase++) {
            // ---- what the product reads
            if (phase == 0 || phase == 2) {
                const u64* words = a.words + (phase ? PK_MID : PK_X);
                take<HIDDEN, true>(me, words, phase ? flag : flag - 1, gains, h0, hn, squares);
                Gains used = others;  // those of the next layer are read now
                if (!ends) others.read(me, a.norms + ((layer + 1) * 2 + phase / 2) * HIDDEN, h0, hn);
                gains = used;
            } else if (phase == 3) {
                if (on > 0) take_bytes(me, a, flag, i0, in);
            } else {
                if (unit.token >= 0) {
                    attend(me, a, unit, flag, layer, slot, shared, sums);
                    if (!ends) ask_for_keys(me, a, unit, layer + 1);
                }
                if (direct) {
                    if (on > 0) take_parts(me, a, flag, c0, cn);
                } else {
                    add_up(me, a, flag, block);
                    if (on > 0) take<HEADS_OUT, false>(me, a.words + PK_ATT, flag, gains, c0, cn, squares);
                }
            }
            const int tiles = phase == 0 ? qn : phase == 2 ? gn : on, groups = phase == 1 ? cn : phase == 3 ? in : hn;
            float* sums_here = phase & 1 ? more_sums : sums;
            product(ring, me, tiles, groups, sums_here + me.warp * tiles * NT * 16);
            __syncthreads();
            // ---- what becomes of it
            if (phase == 0) {  // queries, keys, values
                for (int n = thread; n < qn * 8 * NT; n += THREADS) {
                    int tile = n / (8 * NT), token = n / 8 % NT, row = n % 8 * 2, out = (q0 + tile) * 16 + row;
                    float factor = norm_factor(squares, token);
                    float2 x = added(sums, qn, tile, token, row);
                    x.x *= factor, x.y *= factor;
#if BIAS
                    u32 some = n == thread ? bias : *(const u32*)(a.bias + layer * QKV + out);
                    x.x += low(some), x.y += high(some);
#endif
                    tell(a.words + PK_QKV + (token * QKV + out) / 2, pack(x.x, x.y), flag);
                }
#if BIAS
                if (biased && !ends) bias = *(const u32*)(bias_at + (layer + 1) * QKV);
#endif
            } else if (phase == 2) {  // rows 0 to 7 of a tile are gates, the others what they gate
                // Sixteen lanes have 32 columns of a token, two each, and round them together.
                for (int n = thread; n < gn * 4 * NT; n += THREADS) {
                    int four = n / (16 * NT) * 4, token = n / 16 % NT, tile = four + n % 16 / 4, row = n % 4 * 2;
                    float factor = norm_factor(squares, token);
                    float2 gate = added(sums, gn, tile, token, row), up = added(sums, gn, tile, token, row + 8);
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
                    int column = (g0 + tile) * 8 + row;
                    if (!(n & 1)) tell(a.words + PK_GATED + (token * INTER + column) / 4, pair, flag);
                    if (n % 16 == 0) tell(a.words + PK_FACTOR + (token * INTER + column) / 32, __float_as_uint(most * (1.f / (127.f * 16.f))), flag);
                }
            } else {  // added to the residual
                u64* to = a.words + (phase == 3 ? PK_X : PK_MID);
                for (int n = thread; n < on * 8 * NT; n += THREADS) {
                    int tile = n / (8 * NT), token = n / 8 % NT, row = n % 8 * 2;
                    float2 x = added(sums_here, on, tile, token, row);
                    float2* left = (float2*)(residual + (tile * NT + token) * 16 + row);
                    x.x += left->x, x.y += left->y, *left = x;
                    tell(to + (token * HIDDEN + (o0 + tile) * 16 + row) / 2, pack(x.x, x.y), flag);
                }
            }
        }
    }
    // ---- the last norm, a block for each token
    if (block < NT) {
        const u64* words = a.words + PK_X + block * HIDDEN / 2;
        float square = 0.f;
        __syncthreads();
        for (int n = thread; n < HIDDEN / 2; n += THREADS) {
            u32 pair = wait_one(words + n, base + LAYERS);
            square += low(pair) * low(pair) + high(pair) * high(pair);
        }
        __syncwarp();
        for (int d = 1; d < 32; d *= 2) square += __shfl_xor_sync(FULL, square, d);
        if (me.lane == 0) squares[me.warp * NT] = square;
        __syncthreads();
        float factor = norm_factor(squares, 0);
        for (int n = thread; n < HIDDEN / 2; n += THREADS) {
            u32 pair = wait_one(words + n, base + LAYERS), weight = *(const u32*)(a.final_norm + 2 * n);
            *(u32*)(a.out + block * HIDDEN + 2 * n) = pack(low(pair) * factor * low(weight), high(pair) * factor * high(weight));
        }
        // Every block has read the count long ago: the last layer needed something of each.
        if (block == 0 && thread == 0) *a.launches = *(volatile u32*)a.launches + 1;
    }
}
