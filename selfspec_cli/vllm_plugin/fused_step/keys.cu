// ---- attention of a warp to eight keys ---------------------------------------------------------------------------
struct Keys {
    uint4 key[DIM / 32];       // of key `row`, a quarter
    uint4 value[DIM / 64][2];  // of keys 2 * pair and 2 * pair + 1, an eighth of every 64 dimensions
    int valid;                 // keys
};

// Eight cached keys. Lane (row, pair) reads a quarter of key `row`, which is at `place`.
__device__ __forceinline__ void read_key(Keys& keys, const Lane& lane, const u16* cache, long long place) {
    const u16* key = cache + place + (lane.id & 3) * 8;
#pragma unroll
    for (int n = 0; n < DIM / 32; n++) keys.key[n] = *(const uint4*)(key + n * 32);
}
// Their values: every lane reads some dimensions of two of them.
__device__ __forceinline__ void read_values(
    Keys& keys, const Lane& lane, const Arguments& a, const u16* cache, long long place
) {
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const u16* value = cache + __shfl_sync(FULL, place, (lane.id & 3) * 8 + k * 4) + a.cache_value + lane.row * 8;
#pragma unroll
        for (int n = 0; n < DIM / 64; n++) keys.value[n][k] = *(const uint4*)(value + n * 64);
    }
}
// Both. valid: keys that there are.
__device__ __forceinline__ void read_keys(
    Keys& keys, const Lane& lane, const Arguments& a, const u16* cache, long long place, int valid
) {
    keys.valid = min(8, valid);
    read_key(keys, lane, cache, place);
    read_values(keys, lane, a, cache, place);
}

struct Attended {
    // Values added up: tile e has dimension 8 * row + e, and that + 64, of heads 2 * pair and 2 * pair + 1; with 64
    // dimensions, 8 * row + 2e and 8 * row + 2e + 1.
    float sums[DIM / 16][4], best, weight;  // best, weight: of head `row`
};

__device__ __forceinline__ u32 word_of(const uint4& four, int n) {
    return n == 0 ? four.x : n == 1 ? four.y : n == 2 ? four.z : four.w;
}

// then: called as soon as the keys have been multiplied, before their values are.
template <class Then>
__device__ __forceinline__ void attend_to(
    Attended& found, const Keys& keys, const uint4* query, const Lane& lane, float scale, Then then
) {
    float chains[2][4] = {};
#pragma unroll
    for (int n = 0; n < DIM / 32; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 a0 = half ? query[n].z : query[n].x, a2 = half ? query[n].w : query[n].y;
            u32 b0 = half ? keys.key[n].z : keys.key[n].x, b1 = half ? keys.key[n].w : keys.key[n].y;
            float* c = chains[half];
            multiply_add(c, a0, 0, a2, 0, b0, b1);
        }
    }
    then();
    int key = (lane.id & 3) * 2;
    float first = key < keys.valid ? (chains[0][0] + chains[1][0]) * scale : -INFINITY;
    float second = key + 1 < keys.valid ? (chains[0][1] + chains[1][1]) * scale : -INFINITY;
    float best = fmaxf(first, second);
    best = fmaxf(best, __shfl_xor_sync(FULL, best, 1));
    best = fmaxf(fmaxf(best, __shfl_xor_sync(FULL, best, 2)), found.best);
    float before = exp2_fast(found.best - best);
    first = exp2_fast(first - best), second = exp2_fast(second - best);
    float total = first + second;
    total += __shfl_xor_sync(FULL, total, 1);
    total += __shfl_xor_sync(FULL, total, 2);
    found.weight = found.weight * before + total, found.best = best;
    const u32 shares = pack(first, second);
    const float old = __shfl_sync(FULL, before, key * 4), other = __shfl_sync(FULL, before, key * 4 + 4);
#pragma unroll
    for (int e = 0; e < DIM / 16; e++) {
        float* c = found.sums[e];
        c[0] *= old, c[1] *= other, c[2] *= old, c[3] *= other;
        u32 a[2];
#pragma unroll
        for (int n = 0; n < 2; n++) {
            const int part = DIM == 128 ? n : 0, which = DIM == 128 ? e : 2 * e + n;
            a[n] = __byte_perm(word_of(keys.value[part][0], which / 2), word_of(keys.value[part][1], which / 2),
                               which & 1 ? 0x7632 : 0x5410);
        }
        multiply_add(c, a[0], a[1], shares);
    }
}

// The sums of a warp, [GROUP_HEADS][DIM].
__device__ __forceinline__ void store_attended(const Attended& found, const Lane& lane, float* to) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        int head = (lane.id & 3) * 2 + n;
        if (head < GROUP_HEADS) {
#pragma unroll
            for (int part = 0; part < DIM / 64; part++) {
                float x[8];
#pragma unroll
                for (int e = 0; e < 8; e++) x[e] = DIM == 128 ? found.sums[e][part * 2 + n] : found.sums[e / 2][e % 2 * 2 + n];
                float4* place = (float4*)(to + head * DIM + part * 64 + lane.row * 8);
                place[0] = make_float4(x[0], x[1], x[2], x[3]), place[1] = make_float4(x[4], x[5], x[6], x[7]);
            }
        }
    }
}
