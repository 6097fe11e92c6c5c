// ---- what both kernels know of a model's shape -------------------------------------------------------------------
#define QKV ((QH + 2 * KVH) * DIM)
#define HEADS_OUT (QH * DIM)
#define GROUP_HEADS (QH / KVH)
#define LOG2E 1.4426950408889634f
#define MAX2(a, b) ((a) > (b) ? (a) : (b))

// Weights, as layout.py lays them out: tiles of 16 rows, groups of 64 columns, and a record for a group of a tile. A layer
// has the records of qkv, o, gate and up, and down; of gate and up the records of STRIP tiles and one group lie together.
#define RECORD 544
#define STRIP 4
#define TILES_QKV (QKV / 16)
#define TILES_HIDDEN (HIDDEN / 16)
#define TILES_GATE_UP (2 * INTER / 16)
#define GROUPS_H (HIDDEN / 64)
#define GROUPS_O (HEADS_OUT / 64)
#define GROUPS_I (INTER / 64)
#define FIRST_O (TILES_QKV * GROUPS_H)  // number in a layer of the product's first record
#define FIRST_GATE_UP (FIRST_O + TILES_HIDDEN * GROUPS_O)
#define FIRST_DOWN (FIRST_GATE_UP + TILES_GATE_UP * GROUPS_H)
#define LAYER_BYTES (u64(FIRST_DOWN + TILES_HIDDEN * GROUPS_I) * RECORD)
