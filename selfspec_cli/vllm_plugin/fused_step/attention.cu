// ---- attention of one block ------------------------------------------------------------------------------------
// What a block attends to: one request, one head of keys, one split. The same in every layer.
struct Item {
    long long slot;                  // where the new token's key goes, in elements of a layer's cache; -1: nowhere
    int token, head, split, length;  // token: -1 for none
};

// A warp's tiles of 8 keys: from one to the next, up to all of the request.
struct Tiles {
    int tile, step, all;
};
__device__ __forceinline__ Tiles tiles_of(const Lane& lane, const Item& item) {
    const int splits = splits_for(item.length);
    return {item.split * WARPS + int(lane.warp), splits * WARPS, key_tiles(item.length)};
}

// Where key `row` of a tile is.
__device__ __forceinline__ long long offset_of(const Lane& lane, const Arguments& a, const Item& item, int tile) {
    int at = min(tile * 8 + int(lane.row), item.length - 2);
    int block = a.table[item.token * a.table_row + at / PAGE];
    return block * a.cache_block + at % PAGE * a.cache_token + item.head * a.cache_head;
}

__device__ __forceinline__ Item item_of(const Arguments& a, int block) {
    Item item = {-1, -1, 0, 0, 0};
    int before = 0;
#pragma unroll 1
    for (int token = 0; token < NT; token++) {
        int length = a.lengths[token], splits = splits_for(length), mine = block - before;
        if (mine >= 0 && mine < splits * KVH) {
            item.token = token, item.head = mine / splits, item.split = mine % splits, item.length = length;
        }
        before += splits * KVH;
    }
    if (item.token >= 0 && item.length > 0) {
        long long slot = a.slots[item.token];
        if (slot >= 0) item.slot = slot / PAGE * a.cache_block + slot % PAGE * a.cache_token + item.head * a.cache_head;
    }
    return item;
}

// Where key `row` of the warp's first tile is: the same in every layer, so it is looked up once.
__device__ __forceinline__ long long* first_place(const Lane& lane, char* shared) {
    return (long long*)(shared + AT_PLACES) + lane.warp * 8 + lane.row;
}

// Asks for the keys and values of a layer long before they are read: a miss waits behind all weights on their way.
__device__ __forceinline__ void prefetch_keys(
    const Lane& lane, const Arguments& a, const Item& item, long long first, int layer
) {
    const int lines = DIM / 64;  // of 128 bytes, of a key; as many are its value's
    int line = lane.id & 3;
    if (line >= 2 * lines) return;
    const u16* cache = (const u16*)a.caches[layer] + (line < lines ? 0 : a.cache_value) + line % lines * 64;
    const Tiles tiles = tiles_of(lane, item);
    for (int tile = tiles.tile; tile < tiles.all; tile += tiles.step) {
        long long place = tile == tiles.tile ? first : offset_of(lane, a, item, tile);
        prefetch(cache + place);
    }
}

// One head of the new token by one warp: waits for it, norms it, turns it. part: 0 query, 1 key, 2 value.
// turn: [DIM] cosines, then sines.
__device__ __forceinline__ void load_head(
    const Lane& lane, const Arguments& a, u32 flag, int layer, int token, int number, int part, const float* turn, u16* to,
    u16* cached
) {
    constexpr int PAIRS = DIM / 4;  // of columns, in half a head
    bool here = lane.id < PAIRS;
    int i = here ? lane.id : 0;
    const u64* words = a.words + PK_QKV + token * QKV / 2 + number * DIM / 2;
    float2 cosines = make_float2(1.f, 1.f), sines = make_float2(0.f, 0.f);
    if (part < 2) cosines = *(const float2*)(turn + 2 * i), sines = *(const float2*)(turn + 2 * i + DIM / 2);
    const float cosine[2] = {cosines.x, cosines.y}, sine[2] = {sines.x, sines.y};
    u32 one, two;
    wait_words(words + i, words + PAIRS + i, flag, one, two);
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

// An item, by all warps of the block: queries and the new key and value are made from words, each warp attends to its
// share of tiles of 8 keys by online softmax, and the warps' sums are joined and written, whole (PK_ATT) or as a part with
// its logarithm (PK_PART, PK_LSE), which parts.cu adds up.
__device__ __forceinline__ void attend(
    const Lane& lane, const Arguments& a, const Item& item, u32 flag, int layer, bool direct, char* shared, float* sums
) {
    const int token = item.token, head = item.head, split = item.split, length = item.length;
    const u16* cache = (const u16*)a.caches[layer];
    const Tiles tiles = tiles_of(lane, item);
    int tile = tiles.tile;
    Keys keys;
    if (tile < tiles.all) read_keys(keys, lane, a, cache, *first_place(lane, shared), length - 1 - tile * 8);
    u16 *queries = (u16*)(shared + AT_QUERY), *fresh = (u16*)(shared + AT_NEW);
    const float* turn = (const float*)(shared + AT_ROPE) + token * DIM;
    for (int n = lane.warp; n < GROUP_HEADS + 2; n += WARPS) {
        int part = n < GROUP_HEADS ? 0 : n - GROUP_HEADS + 1;
        int number = part == 0 ? head * GROUP_HEADS + n : QH + (part - 1) * KVH + head;
        u16* to = part == 0 ? queries + n * (DIM + 8) : fresh + (part - 1) * DIM;
        bool writes = part > 0 && split == 0 && item.slot >= 0;
        u16* cached_at = writes ? (u16*)cache + item.slot + (part - 1) * a.cache_value : (u16*)0;
        load_head(lane, a, flag, layer, token, number, part, turn, to, cached_at);
    }
    __syncthreads();
    uint4 query[DIM / 32];
#pragma unroll
    for (int n = 0; n < DIM / 32; n++)
        query[n] = lane.row < GROUP_HEADS ? *(const uint4*)(queries + lane.row * (DIM + 8) + n * 32 + (lane.id & 3) * 8)
                                        : make_uint4(0, 0, 0, 0);
    Attended found = {};
    found.best = -INFINITY;
    // The warp that most likely has no other key takes the newest, too.
    bool newest = (split + 1) * WARPS == tiles.step && lane.warp == WARPS - 1 && length > 0;
#pragma unroll 1
    while (newest || tile < tiles.all) {
        const bool cached = tile < tiles.all;
        if (!cached) {
            newest = false;
#pragma unroll
            for (int n = 0; n < DIM / 32; n++)
                keys.key[n] = lane.row == 0 ? *(const uint4*)(fresh + n * 32 + (lane.id & 3) * 8) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int n = 0; n < DIM / 64; n++) {
                keys.value[n][1] = make_uint4(0, 0, 0, 0), keys.value[n][0] = make_uint4(0, 0, 0, 0);
                if ((lane.id & 3) == 0) keys.value[n][0] = *(const uint4*)(fresh + DIM + n * 64 + lane.row * 8);
            }
            keys.valid = 1;
        }
        attend_to(found, keys, query, lane, a.scale, [] {});
        if (cached) tile += tiles.step;
        if (tile < tiles.all) read_keys(keys, lane, a, cache, offset_of(lane, a, item, tile), length - 1 - tile * 8);
    }
    float* stats = sums + WARPS * GROUP_HEADS * DIM;  // [WARPS][GROUP_HEADS][2]
    store_attended(found, lane, sums + lane.warp * GROUP_HEADS * DIM);
    if ((lane.id & 3) == 0 && lane.row < GROUP_HEADS) {
        stats[(lane.warp * GROUP_HEADS + lane.row) * 2] = found.best;
        stats[(lane.warp * GROUP_HEADS + lane.row) * 2 + 1] = found.weight;
    }
    __syncthreads();
    for (int n = lane.warp * 32 + lane.id; n < GROUP_HEADS * DIM / 2; n += THREADS) {
        int which = n / (DIM / 2), d = n % (DIM / 2) * 2;
        // A warp has columns of one head. Each lane reads the statistics of one of the block's warps, for all others.
        static_assert(WARPS <= 16, "two lanes for each warp");
        const float* mine = stats + (lane.id % 16 * GROUP_HEADS + which) * 2;
        const float its_best = lane.id % 16 < WARPS ? mine[0] : -INFINITY, its_weight = lane.id % 16 < WARPS ? mine[1] : 0.f;
        float best = its_best;
#pragma unroll
        for (int step = 1; step < 16; step *= 2) best = fmaxf(best, __shfl_xor_sync(FULL, best, step));
        const float its_share = its_best == -INFINITY ? 0.f : exp2_fast(its_best - best);
        float weight = its_weight * its_share, x = 0.f, y = 0.f;
#pragma unroll
        for (int step = 1; step < 16; step *= 2) weight += __shfl_xor_sync(FULL, weight, step);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float share = __shfl_sync(FULL, its_share, w);
            const float2 sum = *(const float2*)(sums + (w * GROUP_HEADS + which) * DIM + d);
            x = fmaf(sum.x, share, x), y = fmaf(sum.y, share, y);
        }
        float inverse = weight > 0.f ? __fdividef(1.f, weight) : 0.f;
        int column = (head * GROUP_HEADS + which) * DIM + d, part = token * SPLITS + split;
        const u32 pair = pack(x * inverse, y * inverse);
        if (tiles.step == WARPS && !direct) {
            store_flagged(a.words + PK_ATT + (token * HEADS_OUT + column) / 2, pair, flag);
            continue;
        }
        store_flagged(a.words + PK_PART + (part * HEADS_OUT + column) / 2, pair, flag);
        if (d == 0) {
            float log = weight > 0.f ? best + __log2f(weight) : -INFINITY;
            store_flagged(a.words + PK_LSE + part * QH + head * GROUP_HEADS + which, __float_as_uint(log), flag);
        }
    }
    __syncthreads();  // the next product writes where these sums were
}
