// ---- attention of some keys, added up -------------------------------------------------------------------------------------------------
__device__ __forceinline__ int key_tiles(int length) { return (length + 6) / 8; }  // of 8 cached keys

// Into how many parts the keys of a request are split.
__device__ __forceinline__ int splits_of(int length) {
    int wanted = (key_tiles(length) + WARPS - 1) / WARPS;
    if (wanted <= 1) return 1;
    if (DIRECT > 1 && wanted <= DIRECT * 4) return wanted < DIRECT ? wanted : DIRECT;
    if (DIRECT <= 1) wanted = (wanted + 1) / 2;
    return wanted < SPLITS ? wanted : SPLITS;
}

// Four columns of what a token's parts of attention add up to. Reads splits `from`, `from + step`, ...
struct Added {
    float x[4], best, weight;
};
template <int COUNT>
__device__ __forceinline__ void add_parts(
    Added& all, const u64* parts, const u64* sums, u32 flag, int token, int column, int from, int step, int splits
) {
    Two found[COUNT];
    u64 sum[COUNT];
    int head = column / DIM;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        int split = from + n * step;
        found[n] = Two{0, flag, 0, flag}, sum[n] = u64(flag) << 32 | 0xff800000u;
        if (split < splits) {
            found[n] = read_two(parts + ((token * SPLITS + split) * HEADS_OUT + column) / 2);
            sum[n] = read_one(sums + (token * SPLITS + split) * QH + head);
        }
    }
    bool ready = false;
    [[maybe_unused]] u32 tries = 0;
    while (!ready) {
        TRY(tries);
        ready = true;
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            int split = from + n * step;
            if (!found[n].there(flag)) {
                found[n] = read_two(parts + ((token * SPLITS + split) * HEADS_OUT + column) / 2), ready = false;
            }
            if (u32(sum[n] >> 32) != flag) sum[n] = read_one(sums + (token * SPLITS + split) * QH + head), ready = false;
        }
    }
    float best = all.best;
#pragma unroll
    for (int n = 0; n < COUNT; n++) best = fmaxf(best, __uint_as_float(u32(sum[n])));
    float before = best == -INFINITY ? 1.f : exp2_fast(all.best - best);
#pragma unroll
    for (int i = 0; i < 4; i++) all.x[i] *= before;
    all.weight *= before, all.best = best;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        float log = __uint_as_float(u32(sum[n])), share = log == -INFINITY ? 0.f : exp2_fast(log - best);
        all.weight += share;
        all.x[0] = fmaf(share, low(found[n].a), all.x[0]), all.x[1] = fmaf(share, high(found[n].a), all.x[1]);
        all.x[2] = fmaf(share, low(found[n].b), all.x[2]), all.x[3] = fmaf(share, high(found[n].b), all.x[3]);
    }
}

// The warp's groups of attention as bytes, where readers add up the parts of a request themselves.
__device__ __forceinline__ void take_parts(
    const Lane& me, const Arguments& a, u32 flag, int begin, int groups
) {
    constexpr int MOST = ((GROUPS_O + WARPS - 1) / WARPS + 1) / 2;
    __syncwarp();
    for (int token = 0; token < NT; token++) {
        int splits = splits_of(a.lengths[token]);
        Added found[MOST];
#pragma unroll
        for (int n = 0; n < MOST; n++) {
            int column = n * 128 + me.lane * 4;
            found[n] = Added{{0.f, 0.f, 0.f, 0.f}, -INFINITY, 0.f};
            if (column < groups * 64) {
                int at = begin * 64 + column;
                // Who waits asks for one word in a lane, not for all.
                if (DIRECT > 1 && splits > 1) wait_one(a.words + PK_PART + (token * SPLITS * HEADS_OUT + at) / 2, flag);
                if (DIRECT > 1 && splits > 1)
                    add_parts<DIRECT>(found[n], a.words + PK_PART, a.words + PK_LSE, flag, token, at, 0, 1, splits);
                else
                    add_parts<1>(found[n], a.words + PK_PART, a.words + PK_LSE, flag, token, at, 0, 1, 1);
            }
        }
        __syncwarp();
        float x[MOST][4];
#pragma unroll
        for (int n = 0; n < MOST; n++) {
            float inverse = found[n].weight > 0.f ? __fdividef(1.f, found[n].weight) : 0.f;
#pragma unroll
            for (int i = 0; i < 4; i++) x[n][i] = found[n].x[i] * inverse;
        }
        store_rounded<MOST, MOST>(me, x, token * MOST, groups);
    }
    __syncwarp();
}

// Adds up parts for readers: a warp takes 32 columns of a token, eight lanes of four, and four lanes share the splits.
__device__ __forceinline__ void add_up(const Lane& me, const Arguments& a, u32 flag, u32 block) {
    constexpr int ITEMS = HEADS_OUT / 32;
    for (int item = me.warp * NB + block; item < NT * ITEMS; item += NB * WARPS) {
        int token = item / ITEMS, column = item % ITEMS * 32 + (me.lane & 7) * 4, splits = splits_of(a.lengths[token]);
        Added found = {{0.f, 0.f, 0.f, 0.f}, -INFINITY, 0.f};
        for (int from = me.lane / 8; from < (splits + 3) / 4 * 4; from += 16)
            add_parts<4>(found, a.words + PK_PART, a.words + PK_LSE, flag, token, column, from, 4, splits);
        __syncwarp();
#pragma unroll
        for (int d = 8; d < 32; d *= 2) {
            float other = __shfl_xor_sync(FULL, found.best, d), best = fmaxf(found.best, other);
            float mine = found.best == -INFINITY ? 0.f : exp2_fast(found.best - best);
            float its = other == -INFINITY ? 0.f : exp2_fast(other - best);
            found.best = best;
            found.weight = found.weight * mine + __shfl_xor_sync(FULL, found.weight, d) * its;
#pragma unroll
            for (int i = 0; i < 4; i++) found.x[i] = found.x[i] * mine + __shfl_xor_sync(FULL, found.x[i], d) * its;
        }
        if (me.lane < 8) {
            float inverse = found.weight > 0.f ? __fdividef(1.f, found.weight) : 0.f;
            u64* to = a.words + PK_ATT + (token * HEADS_OUT + column) / 2;
            tell(to, pack(found.x[0] * inverse, found.x[1] * inverse), flag);
            tell(to + 1, pack(found.x[2] * inverse, found.x[3] * inverse), flag);
        }
    }
}
