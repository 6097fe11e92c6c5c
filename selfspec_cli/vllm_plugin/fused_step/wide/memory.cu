// All decoder layers of a draft step of 9 to 64 tokens in one kernel, on tensor cores.
//
// layout.py beside this file plans and lays out what it reads, launch.py compiles and launches it. The kernel for 1 to 8
// tokens (../exchange.cu) passes each activation with a flag, and every block reads all of them. With 32 tokens that is
// 32 * 8,960 values * 132 blocks a layer for `down` alone. So this kernel has the following design.
//
// 1. Six phases a layer, each a hop: qkv, attention, o, gate_up, down, finish. Each phase has a counter in memory. A
//    block adds one (release) when its part of the phase is stored. Who reads a phase's results waits (acquire) until
//    the counter says that all blocks have added theirs. A block without work in a phase adds its one at once.
// 2. Activations are stored once, by the phase that computes them, as bf16 in the order in which lanes multiply them
//    (`place_in_fragments`). So a block gets a run of columns of all tokens by one asynchronous copy, without a
//    conversion. A norm's factor is applied after the product, as a factor of each token.
// 3. qkv, o and gate_up split their rows over all blocks. `down` splits rows and columns (DOWN_ROWS x DOWN_SLICES), so a
//    block reads a slice of the intermediate, and stores partial sums in float. `finish` adds the slices up: a block
//    owns the residual of 16 columns, in float in its shared memory, from the first layer to the last.
// 4. Weights are int4 with a scale for each 64 columns, in the records of 544 bytes of ../layout.py. One warp copies those
//    that its block multiplies ahead into a ring, past hops: the ring holds most of a layer. What it copies at a time are
//    slabs of columns of all of the block's tiles. A second warp waits for counters and copies activations, a third
//    one asks for keys ahead of their layer. Twelve or eight warps multiply. They share a block's tiles (ROWS_...) and its
//    columns (the other factor of their number), unpack a record once for all tokens, and add up their sums in shared
//    memory, 16 tokens at a time.
// 5. Attention: one (token, KV head, run of keys) is an item. Items are about as many as blocks, or a multiple. The block
//    that is last to finish an item of a token and head adds up their results.
//
// Bytes and steps of one layer, counted (layout.py's plan for 132 blocks; 512 tokens of context):
//
//                                    1.5 B shape, 16 / 32 / 64 tokens    8B shape, 16 / 32 tokens
//   weights from memory, MB          24.9                                115.9
//   keys and values, MB              8.4 / 16.7 / 33.5                   33.5 / 67.0
//   activations from L2, MB          21 / 42 / 84                        59 / 119
//   partial sums of down, MB         1.1 / 2.2 / 4.3 in and out          2.1 / 4.2 in and out
//   records of the slowest warp      32 / 32 / 38 of 12 warps            147 of 12 / 208 of 8
//   its products on tensor cores     256 / 512 / 1,216                   1,176 / 3,328
//   hops                             6                                   6
//
// Memory gives 4.3 TB/s: 5.8 us for a layer's weights of the 1.5 B shape, 27 us for the 8B shape's, and they are read
// while everything else goes on. So at 16 tokens of the 1.5 B shape the six hops are most of a layer.
//
// Not here yet: the lm_head. It would take the place of `store_outputs`: one more product over the normed tokens, whose
// sums are compared rather than stored: a block keeps each token's maximum and the gate's statistic, and one more hop
// joins them. The loop of a round would go on at `embed` with the tokens found.
//
// Constants by -D, all from layout.py's Build: LAYERS HIDDEN INTER QH KVH DIM (query heads, KV heads, dimensions) PAGE
// BIAS QKNORM ROPE_FLOAT EPSILON of the model; TOKENS (most of a step, a multiple of 16) NB (blocks) WARPS (that multiply)
// ROWS_QKV ROWS_O ROWS_GATE_UP ROWS_DOWN (row groups of warps) DOWN_ROWS DOWN_SLICES TILES (most of a warp) SLAB (groups
// of columns of a copy of activations) RECORDS (of a slot of weights, at most) WEIGHT_SLOTS INPUT_SLOTS ITEMS (of
// attention, of a block, at most), and SHARED and MEMORY, which layout.py counted too.
//
// The parts, in order: ../ptx.cu, ../shape.cu, memory.cu, ../keys.cu, product.cu, attention.cu, trunk.cu.

#define MULTIPLIERS (WARPS * 32)       // threads that multiply
#define THREADS (MULTIPLIERS + 4 * 32) // and a warpgroup of which three copy weights, activations and keys
// Of a thread, given out by warpgroups. With 12 warps 128 at the start, and (3 * 152 + 56) / 4 is 128; with 8 warps 168,
// and (2 * 232 + 40) / 3 is 168.
#define REGISTERS_TO_MULTIPLY (WARPS == 12 ? 152 : 232)
#define REGISTERS_TO_COPY (WARPS == 12 ? 56 : 40)
static_assert(WARPS == 12 || WARPS == 8, "registers for other numbers of warps");
#define COUNT_OF(all, parts) (((all) + (parts) - 1) / (parts))
#define ROUND_UP(count, unit) (COUNT_OF(count, unit) * (unit))

#define OWNED COUNT_OF(TILES_HIDDEN, NB)  // most tiles of the residual in a block
#define BIASED COUNT_OF(TILES_QKV, NB)  // most tiles of qkv in a block
#define SUM_ROW 20                         // floats from a token's 16 sums to the next one's: no two lanes in one bank
#define TILE_SUMS (16 * SUM_ROW)           // floats of a tile's sums for 16 tokens
#define GROUP_BYTES (TOKENS * 128)         // of 64 columns of all tokens

enum Phase { QKV_PHASE, O_PHASE, GATE_UP_PHASE, DOWN_PHASE, ATTENTION_PHASE, FINISH_PHASE, PHASES };

// ---- shared memory, in bytes -----------------------------------------------------------------------------------
#define WEIGHT_SLOT (RECORDS * RECORD)
#define INPUT_SLOT (SLAB * GROUP_BYTES)
// Activations; after the last copy of a phase is multiplied, the warps' sums lie there, or those of attention.
#define SUMS_BYTES(rows, tiles) (WARPS / (rows) * (tiles) * TILE_SUMS * 4)
#define SUMS_QKV SUMS_BYTES(ROWS_QKV, BIASED)
#define SUMS_O SUMS_BYTES(ROWS_O, OWNED)
#define SUMS_GATE_UP SUMS_BYTES(ROWS_GATE_UP, COUNT_OF(TILES_GATE_UP, NB))
#define SUMS_DOWN SUMS_BYTES(ROWS_DOWN, COUNT_OF(TILES_HIDDEN, DOWN_ROWS))
#define SUMS_ATTENTION (WARPS * GROUP_HEADS * (DIM + 2) * 4)
#define AREA MAX2(MAX2(MAX2(SUMS_QKV, SUMS_O), MAX2(SUMS_GATE_UP, SUMS_DOWN)), MAX2(SUMS_ATTENTION, INPUT_SLOTS * INPUT_SLOT))

#define AT_AREA (WEIGHT_SLOTS * WEIGHT_SLOT)
#define AT_RESIDUAL (AT_AREA + ROUND_UP(AREA, 128))          // [OWNED][TOKENS][16] float
#define AT_FACTORS (AT_RESIDUAL + OWNED * TOKENS * 64)       // [TOKENS] float
#define AT_ROPE (AT_FACTORS + TOKENS * 4)                    // [ITEMS][DIM] float: cosines, then sines
#define AT_NORMS (AT_ROPE + ITEMS * DIM * 4)                 // [2 * LAYERS + 1][OWNED * 16] bf16
#define AT_BIAS (AT_NORMS + (2 * LAYERS + 1) * OWNED * 32)   // [LAYERS][BIASED * 16] bf16
#define AT_QUERY (AT_BIAS + BIAS * LAYERS * BIASED * 32)     // [8][DIM + 8] bf16
#define AT_NEW (AT_QUERY + 16 * (DIM + 8))                   // [2][DIM] bf16
#define AT_ITEMS (AT_NEW + 4 * DIM)                          // [ITEMS] Item
#define AT_BARRIERS (AT_ITEMS + ITEMS * 48)
#define AT_BASES (AT_BARRIERS + (2 * WEIGHT_SLOTS + 2 * INPUT_SLOTS + 1) * 8)  // [PHASES] u64
#define AT_LAST (AT_BASES + PHASES * 8)
#define SHARED_BYTES (AT_LAST + 8)

// ---- memory of the grid, in bytes ------------------------------------------------------------------------------
#define IN_COUNTERS 0                                                  // [PHASES] u64, each in 128 bytes of its own
#define IN_ARRIVED (IN_COUNTERS + PHASES * 128)                        // [TOKENS * KVH] u32
#define IN_NORMED ROUND_UP(IN_ARRIVED + TOKENS * KVH * 4, 128)         // fragments of HIDDEN columns
#define IN_SQUARES (IN_NORMED + TOKENS * HIDDEN * 2)                   // [TOKENS][TILES_HIDDEN] float
#define IN_QKV (IN_SQUARES + TOKENS * TILES_HIDDEN * 4)                // [TOKENS][QKV] bf16
#define IN_ATTENDED (IN_QKV + TOKENS * QKV * 2)                        // fragments of HEADS_OUT columns
#define IN_GATED (IN_ATTENDED + TOKENS * HEADS_OUT * 2)                // fragments of INTER columns
#define IN_SUMS (IN_GATED + TOKENS * INTER * 2)                        // [DOWN_SLICES][TILES_HIDDEN][TOKENS][16] float
#define IN_PARTS (IN_SUMS + DOWN_SLICES * TOKENS * HIDDEN * 4)         // [NB * ITEMS][GROUP_HEADS][DIM] float
#define IN_WEIGHTS (IN_PARTS + NB * ITEMS * GROUP_HEADS * DIM * 4)     // [NB * ITEMS][GROUP_HEADS][2] float
#define MEMORY_BYTES (IN_WEIGHTS + NB * ITEMS * GROUP_HEADS * 8)

static_assert(SHARED_BYTES == SHARED && MEMORY_BYTES == MEMORY, "layout.py counts otherwise");
static_assert(SHARED_BYTES <= 232448, "more shared memory than a block of a Hopper GPU has");

struct Arguments {
    const char* weights;       // [LAYERS] records of the four products
    const u16* norms;          // [LAYERS][2][HIDDEN]
    const u16* bias;           // [LAYERS][QKV]
    const u16* head_norms;     // [LAYERS][2][DIM], of queries and keys
    const u16* final_norm;     // [HIDDEN]
    const u16* embedding;      // [vocabulary][HIDDEN]
    const void* rope;          // [positions][DIM] cosines, then sines
    const u64* caches;         // [LAYERS] addresses of the layers' keys
    char* memory;              // [MEMORY_BYTES]; zeros before the first launch
    u64* stamps;               // [NB][LAYERS][STAMPS_OF_LAYER], with -DSTAMPS
    const int* ids;
    const long long* positions;
    const int* lengths;
    const long long* slots;
    const int* table;
    u16* out;                  // [tokens][HIDDEN]
    long long cache_block, cache_head, cache_token, cache_value;  // strides, and where values begin, in elements
    long long table_row;
    int tokens;                // of this step
    float scale;               // of the scores, times log2(e)
};

struct Lane {
    u32 warp, id, row;  // row: id / 4, the row or token of a fragment that the lane has

    // The compiler shall not know the thread: it would keep addresses that follow from it in registers in all phases.
    __device__ __forceinline__ static Lane of(u32 thread) {
        thread = hidden_from_compiler(thread);
        return {thread / 32, thread % 32, thread % 32 / 4};
    }
    __device__ __forceinline__ int thread() const { return warp * 32 + id; }
};

// ---- times of phases -------------------------------------------------------------------------------------------
// With -DSTAMPS: nanoseconds at which the block's first thread came to each point of a layer. Of qkv, o, gate_up and down
// three each: activations are there, multiplied, stored; of attention: begun, qkv is there, stored; of finish: down's
// sums are there, stored. layout.py has their names.
#define STAMPS_OF_LAYER 17
#ifdef STAMPS
#define STAMP(a, layer, n) \
    if (threadIdx.x == 0) (a).stamps[(u64(blockIdx.x) * LAYERS + (layer)) * STAMPS_OF_LAYER + (n)] = nanoseconds()
#else
#define STAMP(a, layer, n)
#endif

// ---- hops ------------------------------------------------------------------------------------------------------
// Counters only grow. A launch adds the same number to each, so what is left of a division by it is of this launch: no
// block can find a counter complete that it has not added to itself.
__device__ __forceinline__ u64* counter_of(const Arguments& a, int phase) {
    return (u64*)(a.memory + IN_COUNTERS + phase * 128);
}
__device__ __forceinline__ u64 base_of(const Arguments& a, int phase) {
    const u64 all = NB * (LAYERS + (phase == FINISH_PHASE ? 1 : 0)), now = load_acquire(counter_of(a, phase));
    return now - now % all;
}
// Until all blocks have ended a phase `times` times in this launch. By one thread; who else reads the phase's results
// must synchronise with it.
__device__ __forceinline__ void wait_for(const Arguments& a, const u64* bases, int phase, int times) {
    const u64 wanted = bases[phase] + u64(times) * NB;
    [[maybe_unused]] u32 tries = 0;
    while (load_acquire(counter_of(a, phase)) < wanted) {
        TRY(tries);
    }
}
// All warps that multiply.
__device__ __forceinline__ void sync_multipliers() { synchronize<1, MULTIPLIERS>(); }

// What the block stored in this phase may be read. By all threads that multiply.
__device__ __forceinline__ void end_phase(const Arguments& a, int phase) {
    sync_multipliers();
    if (threadIdx.x == 0) add_release(counter_of(a, phase), 1);
}

// ---- rings of slots in shared memory ---------------------------------------------------------------------------
// Lanes of a warp that say that it has read a slot. One is enough. With -DARRIVING=32 racecheck can follow every lane.
#ifndef ARRIVING
#define ARRIVING 1
#endif
// One warp fills slots in order, the warps that multiply empty them. Each side has its own copy of this.
template <int SLOTS, int BYTES>
struct Ring {
    char* slots;
    u32 full, empty, slot, parity;  // addresses of the barriers; the slot that is next, and its barriers' phase

    // barriers: [2 * SLOTS], which `init` made.
    __device__ __forceinline__ Ring(char* where, u32 barriers)
        : slots(where), full(barriers), empty(barriers + SLOTS * 8), slot(0), parity(0) {}
    __device__ __forceinline__ void init() const {
        for (u32 n = 0; n < SLOTS; n++) barrier_init(full + n * 8, 1), barrier_init(empty + n * 8, WARPS * ARRIVING);
    }
    // Where `bytes` bytes are to be copied; the slot's barrier expects them. By one thread, or all lanes of a warp.
    __device__ __forceinline__ u32 fill(u32 bytes, u32& barrier, u32 id) {
        barrier_wait(empty + slot * 8, parity ^ 1);
        barrier = full + slot * 8;
        if (id == 0) barrier_arrive_and_expect(barrier, bytes);
        const u32 to = address(slots + slot * BYTES);
        next();
        return to;
    }
    // Where the next copy is. It is there when this returns.
    __device__ __forceinline__ const char* take() const {
        barrier_wait(full + slot * 8, parity);
        return slots + slot * BYTES;
    }
    // The warp has read it.
    __device__ __forceinline__ void release(u32 id) {
        __syncwarp();
        if (id < ARRIVING) barrier_arrive(empty + slot * 8);
        next();
    }

  private:
    __device__ __forceinline__ void next() {
        if (++slot == SLOTS) slot = 0, parity ^= 1;
    }
};
typedef Ring<WEIGHT_SLOTS, WEIGHT_SLOT> Weights;
typedef Ring<INPUT_SLOTS, INPUT_SLOT> Inputs;

// ---- shares of blocks ------------------------------------------------------------------------------------------
// layout.py counts with the same numbers.
struct Share {
    int first, count;
};
__device__ __forceinline__ Share share_of(int all, int part, int parts) {
    const int first = all * part / parts;
    return {first, all * (part + 1) / parts - first};
}

// A block's part of a product: tiles of 16 rows times groups of 64 columns.
struct Work {
    Share tiles, groups;
    int first, columns;      // number in a layer of the product's first record, and its groups of columns
    bool strips;             // whether a group's records of STRIP tiles lie side by side
    int row_groups, splits;  // of warps: those of a row group share its tiles, those of a split its groups of columns
    int slice;               // of columns
};
__device__ __forceinline__ Work work_of(int phase, int block) {
    switch (phase) {
        case QKV_PHASE:
            return {share_of(TILES_QKV, block, NB), {0, GROUPS_H}, 0, GROUPS_H, false, ROWS_QKV, WARPS / ROWS_QKV, 0};
        case O_PHASE: {
            const Share tiles = share_of(TILES_HIDDEN, NB - 1 - block, NB);
            return {tiles, {0, GROUPS_O}, FIRST_O, GROUPS_O, false, ROWS_O, WARPS / ROWS_O, 0};
        }
        case GATE_UP_PHASE: {
            const Share tiles = share_of(TILES_GATE_UP, block, NB);
            return {tiles, {0, GROUPS_H}, FIRST_GATE_UP, GROUPS_H, true, ROWS_GATE_UP, WARPS / ROWS_GATE_UP, 0};
        }
    }
    const int slice = block / DOWN_ROWS;
    const bool some = slice < DOWN_SLICES;
    const Share tiles = share_of(TILES_HIDDEN, block % DOWN_ROWS, DOWN_ROWS), groups = share_of(GROUPS_I, slice, DOWN_SLICES);
    return {some ? tiles : Share{0, 0}, groups, FIRST_DOWN, GROUPS_I, false, ROWS_DOWN, WARPS / ROWS_DOWN, slice};
}
// Which row group and which split a warp is of.
struct Role {
    int row, split;
};
__device__ __forceinline__ Role role_of(const Lane& lane, const Work& work) {
    const int split = lane.warp / work.row_groups;
    return {int(lane.warp) - split * work.row_groups, split};
}
// Slabs whose weights are in one slot.
__device__ __forceinline__ int slabs_together(const Work& work) { return max(1, RECORDS / (SLAB * work.tiles.count)); }
// How far apart, in bytes, a slot has the records of a tile and the next one, and of a group of columns and the next one.
struct Strides {
    int tile, group;
};
__device__ __forceinline__ Strides strides_of(const Work& work) {
    if (work.strips) return {RECORD, work.tiles.count * RECORD};
    return {slabs_together(work) * SLAB * RECORD, RECORD};
}
