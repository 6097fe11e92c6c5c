// ---- attention of some keys, added up -------------------------------------------------------------------------------------------------
__device__ __forceinline__ int key_tiles(int length) { return (length + 6) / 8; }  // of 8 cached keys

// Into how many parts the keys of a request are split. Up to DIRECT of them are added up by those who read them.
__device__ __forceinline__ int splits_for(int length) {
    int wanted = (key_tiles(length) + WARPS - 1) / WARPS;
    if (wanted <= 1) return 1;
    if (DIRECT > 1 && wanted <= DIRECT * 4) return wanted < DIRECT ? wanted : DIRECT;
    if (NT > 1) wanted = (wanted + 1) / 2;
    return wanted < SPLITS ? wanted : SPLITS;
}

// Four columns of some parts of a token's attention, as they are read.
template <int COUNT>
struct Parts {
    Pair values[COUNT];
    u64 logs[COUNT];  // log2 of the sum of their shares

    // Asks for split number `split` of those that `splits` has; what there is not weighs nothing.
    __device__ __forceinline__ void ask(const Arguments& a, u32 flag, int n, int token, int column, int split, int splits) {
        values[n] = Pair{0, flag, 0, flag}, logs[n] = u64(flag) << 32 | 0xff800000u;
        if (split < splits) read(a, n, token, column, split);
    }
    // Asks again if it was not there; whether it was.
    __device__ __forceinline__ bool ask_again(const Arguments& a, u32 flag, int n, int token, int column, int split) {
        const bool ready = values[n].ready(flag) && u32(logs[n] >> 32) == flag;
        if (!ready) read(a, n, token, column, split);
        return ready;
    }

  private:
    __device__ __forceinline__ void read(const Arguments& a, int n, int token, int column, int split) {
        const int part = token * SPLITS + split;
        values[n] = load_pair(a.words + PK_PART + (part * HEADS_OUT + column) / 2);
        logs[n] = load_relaxed(a.words + PK_LSE + part * QH + column / DIM);
    }
};

// What parts add up to.
struct Added {
    float x[4], best, weight;
};
template <int COUNT>
__device__ __forceinline__ void add_parts(Added& all, const Parts<COUNT>& parts) {
    float best = all.best;
#pragma unroll
    for (int n = 0; n < COUNT; n++) best = fmaxf(best, __uint_as_float(u32(parts.logs[n])));
    float before = best == -INFINITY ? 1.f : exp2_fast(all.best - best);
#pragma unroll
    for (int i = 0; i < 4; i++) all.x[i] *= before;
    all.weight *= before, all.best = best;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        float log = __uint_as_float(u32(parts.logs[n])), share = log == -INFINITY ? 0.f : exp2_fast(log - best);
        all.weight += share;
        all.x[0] = fmaf(share, low(parts.values[n].a), all.x[0]), all.x[1] = fmaf(share, high(parts.values[n].a), all.x[1]);
        all.x[2] = fmaf(share, low(parts.values[n].b), all.x[2]), all.x[3] = fmaf(share, high(parts.values[n].b), all.x[3]);
    }
}

// Attention as bytes, the warp's groups, where readers add up its parts themselves.
__device__ __forceinline__ void load_parts_and_quantize(const Lane& lane, const Arguments& a, const int* all_splits, u32 flag, Share share) {
    constexpr int MOST = ITEMS_OF<HEADS_OUT>, ITEMS = MOST * NT;
    constexpr int BATCH = 8 / DIRECT < ITEMS ? 8 / DIRECT : ITEMS;
    const int begin = share.begin, groups = share.groups;
    __syncwarp();
#pragma unroll 1
    for (int start = 0; start < ITEMS; start += BATCH) {
        Parts<DIRECT> parts[BATCH];
        int splits[BATCH];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            const int token = (start + n) / MOST, inside = (start + n) % MOST * 128 + lane.id * 4;
            splits[n] = token < NT && inside < groups * 64 ? all_splits[min(token, NT - 1)] : 0;
#pragma unroll
            for (int part = 0; part < DIRECT; part++)
                parts[n].ask(a, flag, part, token, begin * 64 + inside, part, splits[n]);
        }
        bool all = false;
        [[maybe_unused]] u32 tries = 0;
        while (!all) {
            TRY(tries);
            all = true;
#pragma unroll
            for (int n = 0; n < BATCH; n++) {
                const int token = (start + n) / MOST, column = begin * 64 + (start + n) % MOST * 128 + lane.id * 4;
#pragma unroll
                for (int part = 0; part < DIRECT; part++) all &= parts[n].ask_again(a, flag, part, token, column, part);
            }
        }
        __syncwarp();
        float x[BATCH][4];
#pragma unroll
        for (int n = 0; n < BATCH; n++) {
            Added added = {{0.f, 0.f, 0.f, 0.f}, -INFINITY, 0.f};
            add_parts(added, parts[n]);
            float inverse = added.weight > 0.f ? __fdividef(1.f, added.weight) : 0.f;
#pragma unroll
            for (int i = 0; i < 4; i++) x[n][i] = added.x[i] * inverse;
        }
        quantize_items<MOST, BATCH>(lane, x, start, groups);
    }
    __syncwarp();
}

// Adds up parts for readers: a warp takes 32 columns of a token, eight lanes of four, and four lanes share the splits.
__device__ __forceinline__ void add_up(const Lane& lane, const Arguments& a, const int* all_splits, u32 flag, u32 block) {
    constexpr int ITEMS = HEADS_OUT / 32;
    for (int item = lane.warp * NB + block; item < NT * ITEMS; item += NB * WARPS) {
        int token = item / ITEMS, column = item % ITEMS * 32 + (lane.id & 7) * 4, splits = all_splits[token];
        if (splits == 1) continue;  // written by the block that attended
        Added added = {{0.f, 0.f, 0.f, 0.f}, -INFINITY, 0.f};
        for (int from = lane.id / 8; from < (splits + 3) / 4 * 4; from += 16) {
            Parts<4> parts;
#pragma unroll
            for (int n = 0; n < 4; n++) parts.ask(a, flag, n, token, column, from + n * 4, splits);
            bool all = false;
            [[maybe_unused]] u32 tries = 0;
            while (!all) {
                TRY(tries);
                all = true;
#pragma unroll
                for (int n = 0; n < 4; n++) all &= parts.ask_again(a, flag, n, token, column, from + n * 4);
            }
            add_parts(added, parts);
        }
        __syncwarp();
#pragma unroll
        for (int d = 8; d < 32; d *= 2) {
            float other = __shfl_xor_sync(FULL, added.best, d), best = fmaxf(added.best, other);
            float mine = added.best == -INFINITY ? 0.f : exp2_fast(added.best - best);
            float its = other == -INFINITY ? 0.f : exp2_fast(other - best);
            added.best = best;
            added.weight = added.weight * mine + __shfl_xor_sync(FULL, added.weight, d) * its;
#pragma unroll
            for (int i = 0; i < 4; i++) added.x[i] = added.x[i] * mine + __shfl_xor_sync(FULL, added.x[i], d) * its;
        }
        if (lane.id < 8) {
            float inverse = added.weight > 0.f ? __fdividef(1.f, added.weight) : 0.f;
            u64* to = a.words + PK_ATT + (token * HEADS_OUT + column) / 2;
            store_flagged(to, pack(added.x[0] * inverse, added.x[1] * inverse), flag);
            store_flagged(to + 1, pack(added.x[2] * inverse, added.x[3] * inverse), flag);
        }
    }
}
