// ---- attention of one block ------------------------------------------------------------------------------------
struct Keys {
    uint4 key[DIM / 32];       // of key `row`, a quarter
    uint4 value[DIM / 64][2];  // of keys 2 * pair and 2 * pair + 1, an eighth of every 64 dimensions
    int valid;                 // keys
};

// What a block attends to: one request, one head of keys, one split. The same in every layer.
struct Unit {
    int token, head, split, splits, length;  // token: -1 for none
    int tile, step, tiles;                   // the warp's first tile of 8 keys, from one to the next, and of the request
    long long place;                         // of key `row` of the first tile, in elements of a layer's cache
};

// Where key `row` of a tile is.
__device__ __forceinline__ long long place_of(const Lane& me, const Arguments& a, const Unit& unit, int tile) {
    int at = min(tile * 8 + int(me.row), unit.length - 2);
    int block = a.table[unit.token * a.table_row + at / PAGE];
    return block * a.cache_block + at % PAGE * a.cache_token + unit.head * a.cache_head;
}

__device__ __forceinline__ Unit unit_of(const Lane& me, const Arguments& a, int block) {
    Unit unit;
    unit.token = -1, unit.tile = unit.tiles = 0;
    int before = 0;
#pragma unroll 1
    for (int token = 0; token < NT; token++) {
        int length = a.lengths[token], splits = splits_of(length), mine = block - before;
        if (mine >= 0 && mine < splits * KVH) {
            unit.token = token, unit.head = mine / splits, unit.split = mine % splits;
            unit.splits = splits, unit.length = length, unit.tiles = key_tiles(length);
            unit.tile = unit.split * WARPS + me.warp, unit.step = splits * WARPS;
        }
        before += splits * KVH;
    }
    unit.place = unit.tile < unit.tiles ? place_of(me, a, unit, unit.tile) : 0;
    return unit;
}

// Asks for the keys and values of a layer long before they are read: a miss waits behind all weights on their way.
__device__ __forceinline__ void ask_for_keys(const Lane& me, const Arguments& a, const Unit& unit, int layer) {
    const int lines = DIM / 64;  // of 128 bytes, of a key; as many are its value's
    int line = me.lane & 3;
    if (line >= 2 * lines) return;
    const u16* cache = (const u16*)a.caches[layer] + (line < lines ? 0 : a.cache_value) + line % lines * 64;
    for (int tile = unit.tile; tile < unit.tiles; tile += unit.step) {
        long long place = tile == unit.tile ? unit.place : place_of(me, a, unit, tile);
        asm volatile("prefetch.global.L2 [%0];" ::"l"(cache + place));
    }
}

// Eight cached keys. Lane (row, pair) reads a quarter of key `row`, which is at `place`, and DPL dimensions of all values.
__device__ __forceinline__ void read_keys(
    Keys& keys, const Lane& me, const Arguments& a, const u16* cache, long long place, int valid
) {
    keys.valid = min(8, valid);
    const u16* key = cache + place + (me.lane & 3) * 8;
#pragma unroll
    for (int n = 0; n < DIM / 32; n++) keys.key[n] = *(const uint4*)(key + n * 32);
#pragma unroll
    for (int k = 0; k < 2; k++) {
        const u16* value = cache + __shfl_sync(FULL, place, (me.lane & 3) * 8 + k * 4) + a.cache_value + me.row * 8;
#pragma unroll
        for (int n = 0; n < DIM / 64; n++) keys.value[n][k] = *(const uint4*)(value + n * 64);
    }
}

struct Attended {
    // Values added up: tile e has dimension 8 * row + e, and that + 64, of heads 2 * pair and 2 * pair + 1; with 64
    // dimensions, 8 * row + 2e and 8 * row + 2e + 1.
    float sums[DIM / 16][4], best, weight;  // best, weight: of head `row`
};

__device__ __forceinline__ u32 word_of(const uint4& four, int n) {
    return n == 0 ? four.x : n == 1 ? four.y : n == 2 ? four.z : four.w;
}

__device__ __forceinline__ void attend_to(Attended& found, const Keys& keys, const uint4* query, const Lane& me, float scale) {
    float chains[2][4] = {};
#pragma unroll
    for (int n = 0; n < DIM / 32; n++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 a0 = half ? query[n].z : query[n].x, a2 = half ? query[n].w : query[n].y;
            u32 b0 = half ? keys.key[n].z : keys.key[n].x, b1 = half ? keys.key[n].w : keys.key[n].y;
            float* c = chains[half];
            asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
        }
    }
    int key = (me.lane & 3) * 2;
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
        asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(shares));
    }
}

// The sums of a warp, [GROUP_HEADS][DIM].
__device__ __forceinline__ void put_attended(const Attended& found, const Lane& me, float* to) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
        int head = (me.lane & 3) * 2 + n;
        if (head < GROUP_HEADS) {
#pragma unroll
            for (int part = 0; part < DIM / 64; part++) {
                float x[8];
#pragma unroll
                for (int e = 0; e < 8; e++) x[e] = DIM == 128 ? found.sums[e][part * 2 + n] : found.sums[e / 2][e % 2 * 2 + n];
                float4* place = (float4*)(to + head * DIM + part * 64 + me.row * 8);
                place[0] = make_float4(x[0], x[1], x[2], x[3]), place[1] = make_float4(x[4], x[5], x[6], x[7]);
            }
        }
    }
}

// One head of the new token by one warp: waits for it, norms it, turns it. part: 0 query, 1 key, 2 value.
// turn: [DIM] cosines, then sines.
__device__ __forceinline__ void take_head(
    const Lane& me, const Arguments& a, u32 flag, int layer, int token, int number, int part, const float* turn, u16* to,
    u16* cached
) {
    constexpr int PAIRS = DIM / 4;  // of columns, in half a head
    bool here = me.lane < PAIRS;
    int i = here ? me.lane : 0;
    const u64* words = a.words + PK_QKV + token * QKV / 2 + number * DIM / 2;
    float2 cosines = make_float2(1.f, 1.f), sines = make_float2(0.f, 0.f);
    if (part < 2) cosines = *(const float2*)(turn + 2 * i), sines = *(const float2*)(turn + 2 * i + DIM / 2);
    const float cosine[2] = {cosines.x, cosines.y}, sine[2] = {sines.x, sines.y};
    u32 one, two;
    wait_both(words + i, words + PAIRS + i, flag, one, two);
    __syncwarp();
    float x[2] = {low(one), high(one)}, y[2] = {low(two), high(two)};
#if QKNORM
    if (part < 2) {
        float square = here ? x[0] * x[0] + x[1] * x[1] + y[0] * y[0] + y[1] * y[1] : 0.f;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) square += __shfl_xor_sync(FULL, square, d);
        float factor = rsqrtf(square / DIM + EPSILON);
        const u16* weight = a.head_norms + (layer * 2 + part) * DIM + 2 * i;
#pragma unroll
        for (int n = 0; n < 2; n++) x[n] *= factor * plain(weight[n]), y[n] *= factor * plain(weight[n + DIM / 2]);
    }
#endif
    u32 first = pack(x[0] * cosine[0] - y[0] * sine[0], x[1] * cosine[1] - y[1] * sine[1]);
    u32 second = pack(y[0] * cosine[0] + x[0] * sine[0], y[1] * cosine[1] + x[1] * sine[1]);
    if (here) {
        *(u32*)(to + 2 * i) = first, *(u32*)(to + 2 * i + DIM / 2) = second;
        if (cached) *(u32*)(cached + 2 * i) = first, *(u32*)(cached + 2 * i + DIM / 2) = second;
    }
}

// A unit, by all warps of the block.
__device__ __forceinline__ void attend(
    const Lane& me, const Arguments& a, const Unit& unit, u32 flag, int layer, long long slot, char* shared, float* sums
) {
    const int token = unit.token, head = unit.head, split = unit.split, length = unit.length;
    const u16* cache = (const u16*)a.caches[layer];
    int tile = unit.tile;
    Keys keys;
    if (tile < unit.tiles) read_keys(keys, me, a, cache, unit.place, length - 1 - tile * 8);
    u16 *queries = (u16*)(shared + AT_QUERY), *fresh = (u16*)(shared + AT_NEW);
    const float* turn = (const float*)(shared + AT_ROPE) + token * DIM;
    for (int n = me.warp; n < GROUP_HEADS + 2; n += WARPS) {
        int part = n < GROUP_HEADS ? 0 : n - GROUP_HEADS + 1;
        int number = part == 0 ? head * GROUP_HEADS + n : QH + (part - 1) * KVH + head;
        u16* to = part == 0 ? queries + n * (DIM + 8) : fresh + (part - 1) * DIM;
        bool writes = part > 0 && split == 0 && slot >= 0;
        u16* cached_at = writes ? (u16*)cache + slot + (part - 1) * a.cache_value : (u16*)0;
        take_head(me, a, flag, layer, token, number, part, turn, to, cached_at);
    }
    __syncthreads();
    uint4 query[DIM / 32];
#pragma unroll
    for (int n = 0; n < DIM / 32; n++)
        query[n] = me.row < GROUP_HEADS ? *(const uint4*)(queries + me.row * (DIM + 8) + n * 32 + (me.lane & 3) * 8)
                                        : make_uint4(0, 0, 0, 0);
    Attended found = {};
    found.best = -INFINITY;
    // The warp that most likely has no other key takes the newest, too.
    bool newest = split == unit.splits - 1 && me.warp == WARPS - 1 && length > 0;
#pragma unroll 1
    while (newest || tile < unit.tiles) {
        const bool cached = tile < unit.tiles;
        if (!cached) {
            newest = false;
#pragma unroll
            for (int n = 0; n < DIM / 32; n++)
                keys.key[n] = me.row == 0 ? *(const uint4*)(fresh + n * 32 + (me.lane & 3) * 8) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int n = 0; n < DIM / 64; n++) {
                keys.value[n][1] = make_uint4(0, 0, 0, 0), keys.value[n][0] = make_uint4(0, 0, 0, 0);
                if ((me.lane & 3) == 0) keys.value[n][0] = *(const uint4*)(fresh + DIM + n * 64 + me.row * 8);
            }
            keys.valid = 1;
        }
        attend_to(found, keys, query, me, a.scale);
        if (cached) tile += unit.step;
        if (tile < unit.tiles) read_keys(keys, me, a, cache, place_of(me, a, unit, tile), length - 1 - tile * 8);
    }
    float* stats = sums + WARPS * GROUP_HEADS * DIM;  // [WARPS][GROUP_HEADS][2]
    put_attended(found, me, sums + me.warp * GROUP_HEADS * DIM);
    if ((me.lane & 3) == 0 && me.row < GROUP_HEADS) {
        stats[(me.warp * GROUP_HEADS + me.row) * 2] = found.best;
        stats[(me.warp * GROUP_HEADS + me.row) * 2 + 1] = found.weight;
    }
    __syncthreads();
    for (int n = me.warp * 32 + me.lane; n < GROUP_HEADS * DIM / 2; n += THREADS) {
        int which = n / (DIM / 2), d = n % (DIM / 2) * 2;
        float best = -INFINITY, weight = 0.f, x = 0.f, y = 0.f;
#pragma unroll 4
        for (int w = 0; w < WARPS; w++) best = fmaxf(best, stats[(w * GROUP_HEADS + which) * 2]);
#pragma unroll 4
        for (int w = 0; w < WARPS; w++) {
            float its = stats[(w * GROUP_HEADS + which) * 2], share = its == -INFINITY ? 0.f : exp2_fast(its - best);
            float2 sum = *(const float2*)(sums + (w * GROUP_HEADS + which) * DIM + d);
            weight = fmaf(stats[(w * GROUP_HEADS + which) * 2 + 1], share, weight);
            x = fmaf(sum.x, share, x), y = fmaf(sum.y, share, y);
        }
        float inverse = weight > 0.f ? __fdividef(1.f, weight) : 0.f;
        int number = head * GROUP_HEADS + which, part = token * SPLITS + split;
        tell(a.words + PK_PART + (part * HEADS_OUT + number * DIM + d) / 2, pack(x * inverse, y * inverse), flag);
        if (d == 0)  // a closed request attends to nothing: its result is 0, and it has one part
            tell(a.words + PK_LSE + part * QH + number, __float_as_uint(weight > 0.f ? best + __log2f(weight) : 0.f), flag);
    }
    __syncthreads();  // the next product writes where these sums were
}
