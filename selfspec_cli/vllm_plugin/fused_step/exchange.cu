// All decoder layers of a draft step in one kernel; layout.py makes what it reads, launch.py compiles and launches it.
//
// One block a multiprocessor. Every warp copies the 4-bit weights that it multiplies, in the order in which it needs them
// in the whole trunk, ahead of time into a ring in shared memory. So the memory is read without a pause
// while blocks exchange activations. They do that without a barrier: what a phase writes is words of 64 bits, 32 of
// them a flag that tells the layer and the launch, and who needs a word reads it until its flag is right.
//
// A weight tile is 16 rows. Of its columns a record holds one group of 64: 512 bytes of integers in the order in which
// lanes multiply them, and 16 scales in half precision. Tokens are rounded to signed bytes by 32 columns and multiplied
// on tensor cores, tokens as columns of a product with 16 rows of weights. A byte has two weights, of columns 32 apart. The
// first is its low half, with 8 added; the second its high half, which is multiplied as 16 times itself. So one `and`
// makes bytes of four weights, with no shift, and 8 times the sum of a token's integers is subtracted once for all rows.
//
// Constants by -D: LAYERS HIDDEN INTER QH KVH DIM (query heads, heads, dimensions) NT (tokens) WARPS NB (blocks) RECORDS
// (of a chunk of a ring, at most) SLOTS (chunks of a ring) CHUNKS (of a layer, at most) TILES (most tiles of a block in a
// phase) ROWS (most tiles of the residual in a block) SHARED_AREA PADDED (below) PAGE BIAS QKNORM ROPE_FLOAT EPSILON DIRECT
// (most splits that readers add up themselves), and SHARED and WORDS, which launch.py counted, too.
//
// The parts, in order: ptx.cu, shape.cu, exchange.cu, weights.cu, tokens.cu, parts.cu, keys.cu, attention.cu, trunk.cu.

#define THREADS (WARPS * 32)
#define CHUNK (RECORD * RECORDS)
#define MOST_GROUPS ((MAX2(MAX2(GROUPS_H, GROUPS_O), GROUPS_I) + WARPS - 1) / WARPS)
#define SPLITS (MAX2(1, NB / (NT * KVH)) < 64 ? MAX2(1, NB / (NT * KVH)) : 64)

// ---- columns of a product ---------------------------------------------------------------------------------------
// Up to four tokens are the even columns of a product, so that every lane has the sums of one of them; more are all
// columns, and a lane has the sums of two.
#define LANE_TOKENS (NT <= 4 ? 1 : 2)
#define TOKEN_GROUPS ((NT + LANE_TOKENS - 1) / LANE_TOKENS)  // of LANE_TOKENS tokens
#define EVEN_NT (NT == 1 ? 1 : (NT + 1) / 2 * 2)      // tokens that shared memory has room for
// Sums of a tile, of one warp. PADDED: with a gap, so that lanes that read four tiles together find different banks.
#define TILE_SUMS (TOKEN_GROUPS * LANE_TOKENS * 16 + (PADDED ? 8 : 0))

// ---- shared memory, in bytes -----------------------------------------------------------------------------------
// Every warp has an area of its own: its tokens as bytes, and its sums of a phase. SHARED_AREA: sums of a phase lie
// where the bytes of the next one will be, and blocks wait for their readers; else each has its place, and those of
// the phases that follow each other alternate.
#define BYTES_WARP (MOST_GROUPS * EVEN_NT * 64)
#define BYTES_SHORT ((MAX2(GROUPS_H, GROUPS_O) + WARPS - 1) / WARPS * EVEN_NT * 64)  // of all phases but down
#define SUMS_AT_EVEN (SHARED_AREA ? BYTES_SHORT : BYTES_WARP)  // of qkv and of gate and up
#define SUMS_AT_O (SHARED_AREA ? BYTES_SHORT : BYTES_WARP + TILES * TILE_SUMS * 4)
#define SUMS_AT_DOWN (SHARED_AREA ? BYTES_WARP : BYTES_WARP + TILES * TILE_SUMS * 4)
#define AREA_WARP MAX2(SUMS_AT_EVEN + TILES * TILE_SUMS * 4, SUMS_AT_DOWN + ROWS * TILE_SUMS * 4)
#define SUMS_ATT (WARPS * GROUP_HEADS * (DIM + 2) * 4)  // of attention; in the warps' areas
#define FACTORS_WARP (MOST_GROUPS * EVEN_NT * 8)
#define AT_AREA (WARPS * SLOTS * CHUNK)
#define AT_FACTORS (AT_AREA + (MAX2(WARPS * AREA_WARP, SUMS_ATT) + 15) / 16 * 16)
#define AT_SQUARES ((AT_FACTORS + WARPS * FACTORS_WARP + 15) / 16 * 16)
#define AT_RESIDUAL (AT_SQUARES + WARPS * NT * 4)
#define AT_QUERY (AT_RESIDUAL + (ROWS * 16 * NT * 4 + 15) / 16 * 16)
#define AT_NEW (AT_QUERY + 8 * (DIM + 8) * 2)
#define AT_ROPE (AT_NEW + 2 * DIM * 2)
#define AT_PLACES (AT_ROPE + NT * DIM * 4)  // [WARPS][8] where the keys of a warp's first tile are
#define AT_BARRIERS (AT_PLACES + WARPS * 8 * 8)
#define AT_PLAN (AT_BARRIERS + WARPS * SLOTS * 8)
#define AT_ITEM (AT_PLAN + 24)
#define AT_SPLITS (AT_ITEM + 24)
#define AT_CHUNKS (AT_SPLITS + NT * 4)
#define SHARED_BYTES (AT_CHUNKS + WARPS * CHUNKS * 4)

// ---- words that blocks exchange, in units of 8 bytes -----------------------------------------------------------
#define PK_X 0                                      // [NT][HIDDEN / 2] the residual before a layer
#define PK_QKV (PK_X + NT * HIDDEN / 2)             // [NT][QKV / 2]
#define PK_PART (PK_QKV + NT * QKV / 2)             // [NT][SPLITS][HEADS_OUT / 2] attention of some keys
#define PK_LSE (PK_PART + NT * SPLITS * HEADS_OUT / 2)  // [NT][SPLITS][QH] log2 of the sum of their shares
#define PK_ATT (PK_LSE + (NT * SPLITS * QH + 1) / 2 * 2)  // [NT][HEADS_OUT / 2] attention
#define PK_MID (PK_ATT + NT * HEADS_OUT / 2)        // [NT][HIDDEN / 2] the residual after attention
#define PK_GATED (PK_MID + NT * HIDDEN / 2)         // [NT][INTER / 4] what comes before down, as bytes
#define PK_FACTOR (PK_GATED + NT * INTER / 4)       // [NT][INTER / 32] and their factors
#define PK_WORDS (PK_FACTOR + NT * INTER / 32)

static_assert(SHARED_BYTES == SHARED && PK_WORDS == WORDS, "launch.py counts otherwise");
static_assert(RECORDS >= 2 && STRIP % RECORDS == 0, "products read two records or more of a chunk");

struct Arguments {
    const char* weights;       // [LAYERS] records of the four products
    const u16* norms;          // [LAYERS][2][HIDDEN]
    const u16* bias;           // [LAYERS][QKV]
    const u16* head_norms;     // [LAYERS][2][DIM], of queries and keys
    const u16* final_norm;     // [HIDDEN]
    const u16* embedding;      // [vocabulary][HIDDEN]
    const void* rope;          // [positions][DIM] cosines, then sines
    const u64* caches;         // [LAYERS] addresses of the layers' keys
    const int* plan;           // [NB][6] first tile and tiles of qkv, of the residual's rows (o and down), of gate and up
    u64* words;                // [PK_WORDS]
    u32* launches;
    const int* ids;
    const long long* positions;
    const int* lengths;
    const long long* slots;
    const int* table;
    u16* out;                  // [NT][HIDDEN]
    long long cache_block, cache_head, cache_token, cache_value;  // strides, and where values begin, in elements
    long long table_row;
    float scale;               // of the scores, times log2(e)
};

// ---- words with a flag ------------------------------------------------------------------------------------------
struct Pair {
    u32 a, flag_a, b, flag_b;
    __device__ __forceinline__ bool ready(u32 flag) const { return flag_a == flag && flag_b == flag; }
};
__device__ __forceinline__ Pair load_pair(const u64* place) {
    u64 a, b;
    load_relaxed(place, a, b);
    return {u32(a), u32(a >> 32), u32(b), u32(b >> 32)};
}
__device__ __forceinline__ u32 wait_word(const u64* place, u32 flag) {
    u64 word = load_relaxed(place);
    [[maybe_unused]] u32 tries = 0;
    while (u32(word >> 32) != flag) {
        TRY(tries);
        word = load_relaxed(place);
    }
    return u32(word);
}
__device__ __forceinline__ void wait_words(const u64* place, const u64* other, u32 flag, u32& one, u32& two) {
    u64 word = load_relaxed(place), another = load_relaxed(other);
    [[maybe_unused]] u32 tries = 0;
    while (u32(word >> 32) != flag || u32(another >> 32) != flag) {
        TRY(tries);
        word = load_relaxed(place), another = load_relaxed(other);
    }
    one = u32(word), two = u32(another);
}
__device__ __forceinline__ void store_flagged(u64* place, u32 value, u32 flag) {
    store_relaxed(place, u64(flag) << 32 | value);
}
