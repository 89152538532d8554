// Attention of the rows of a step: tree nodes and speculative streams, over one slice of the cache.
//
// A threadgroup owns query rows of one key/value head: all rows of all query heads that share it,
// or an equal part of them where they are too many. It walks along the keys in tiles of 32. A tile
// is copied to threadgroup memory once, for every row; a simdgroup then has 8 rows (or 16) of its
// own, and keeps their running maximum, sum and output in registers (online softmax).
//
// Who sees whom is one 32-bit word for a row and a tile. Tiles beyond the words are committed
// tokens, which every row sees; the last tile's missing keys are cleared in the same word.
//
// Products are 8 x 8 matrices of the simdgroup. Their two elements a lane lie where MLX's own
// attention kernels (steel, BaseMMAFrag) expect them. Everything is added up in float32.

#include <metal_simdgroup_matrix>

#define UNROLL _Pragma("clang loop unroll(full)")

constant constexpr int TILE = 32;       // keys of a tile, and bits of a mask word
constant constexpr int FRAGMENT = 8;    // rows and columns of a simdgroup's matrix
constant constexpr float UNSEEN = -3.0e38f;  // below every score, and finite: fast math has no -inf
constant constexpr float LOG2_E = 1.44269504f;  // exp(x) is exp2(x * LOG2_E); Apple GPUs have exp2

// Elements between two keys of a tile: 16 bytes more than a key, so that the lanes of a simdgroup
// reach different banks of threadgroup memory.
template <typename T, int D>
METAL_FUNC constexpr int tile_pitch() {
  return D + 16 / int(sizeof(T));
}

// Where a lane's two elements are in an 8 x 8 matrix: (row, column) and (row, column + 1).
struct Place {
  short row;
  short column;
};

METAL_FUNC Place place_of(uint lane) {
  const short quad = short(lane / 4);
  const short row = short((quad & 4) + short(lane / 2 % 4));
  const short column = short((quad & 2) * 2 + short(lane % 2) * 2);
  return Place{row, column};
}

// sum += left right, matrices of 8 x 8.
METAL_FUNC void multiply_add(thread float2& sum, float2 left, float2 right) {
  metal::simdgroup_matrix<float, FRAGMENT, FRAGMENT> a, b, c;
  reinterpret_cast<thread float2&>(a.thread_elements()) = left;
  reinterpret_cast<thread float2&>(b.thread_elements()) = right;
  reinterpret_cast<thread float2&>(c.thread_elements()) = sum;
  metal::simdgroup_multiply_accumulate(c, a, b, c);
  sum = reinterpret_cast<thread float2&>(c.thread_elements());
}

// Over the four lanes that hold one row of a matrix: they differ in bits 0 and 3.
METAL_FUNC float row_max(float value) {
  value = metal::max(value, metal::simd_shuffle_xor(value, 1));
  return metal::max(value, metal::simd_shuffle_xor(value, 8));
}

METAL_FUNC float row_sum(float value) {
  value += metal::simd_shuffle_xor(value, 1);
  return value + metal::simd_shuffle_xor(value, 8);
}

// Keys, or values, of one head: [num_keys, D], `stride` elements apart.
template <typename T>
struct Side {
  const device T* start;
  int64_t stride;
};

// Which keys the rows see: [num_rows, words] words of 32 keys; every key behind them.
struct Mask {
  const device uint32_t* bits;
  int words;
  int num_keys;
};

// Threadgroup memory for one tile, and a thread's part in filling it.
template <typename T>
struct Copy {
  threadgroup T* tile;
  int thread_index;
  int num_threads;
};

// Bit j: whether `row` sees key 32 * tile + j.
METAL_FUNC uint seen_keys(Mask mask, int row, int tile) {
  const uint seen = tile < mask.words ? mask.bits[row * mask.words + tile] : ~0u;
  const int left = mask.num_keys - tile * TILE;
  return left < TILE ? seen & ((1u << left) - 1u) : seen;
}

// Copy one tile of `side` for the whole threadgroup. Keys that are not there are 0.
template <typename T, int D>
METAL_FUNC void copy_tile(Side<T> side, int num_keys, int tile, Copy<T> copy) {
  constexpr int CHUNK = 4, CHUNKS = D / CHUNK;
  for (int i = copy.thread_index; i < TILE * CHUNKS; i += copy.num_threads) {
    const int in_tile = i / CHUNKS, element = i % CHUNKS * CHUNK;
    const int key = tile * TILE + in_tile;
    metal::vec<T, CHUNK> chunk = metal::vec<T, CHUNK>(T(0));
    if (key < num_keys) {
      const device T* source = side.start + key * side.stride + element;
      chunk = *reinterpret_cast<const device metal::vec<T, CHUNK>*>(source);
    }
    threadgroup T* target = copy.tile + in_tile * tile_pitch<T, D>() + element;
    *reinterpret_cast<threadgroup metal::vec<T, CHUNK>*>(target) = chunk;
  }
}

// What a lane holds of a block of 8 query rows: a quarter of one row.
template <int D>
struct Rows {
  float2 query[D / FRAGMENT];
  float2 output[D / FRAGMENT];
  float largest;  // of the scores so far, in units of log2
  float total;    // of their exponentials, relative to `largest`
  int head;       // query head
  int row;        // row of the step; -1 where the block is larger than what is left
};

// What a lane holds of a block's scores against one tile, and then of their exponentials.
struct Scores {
  float2 at[TILE / FRAGMENT];
};

// Take row `index` of the threadgroup's key/value head: heads first, then rows.
template <typename T, int D>
METAL_FUNC void load_row(
    thread Rows<D>& rows, const device T* q, const constant int64_t* strides, float scale,
    int index, int num_rows, int first_head, int group, Place place) {
  const bool exists = index < num_rows * group;
  rows.head = first_head + (exists ? index / num_rows : 0);
  rows.row = exists ? index % num_rows : -1;
  rows.largest = UNSEEN;
  rows.total = 0;
  const device T* query = q + rows.head * strides[1] + (exists ? rows.row : 0) * strides[2];
  const float factor = exists ? scale * LOG2_E : 0.0f;
  UNROLL for (int f = 0; f < D / FRAGMENT; f++) {
    const int element = f * FRAGMENT + place.column;
    rows.query[f] = factor *
        float2(static_cast<float>(query[element * strides[3]]),
               static_cast<float>(query[(element + 1) * strides[3]]));
    rows.output[f] = float2(0);
  }
}

// Scores of a simdgroup's rows against a tile of keys: Q K^T.
template <typename T, int D, int BLOCKS>
METAL_FUNC void score(
    thread const Rows<D>* rows, const threadgroup T* keys, Place place, thread Scores* scores) {
  constexpr int PITCH = tile_pitch<T, D>();
  UNROLL for (int c = 0; c < TILE / FRAGMENT; c++) {
    UNROLL for (int b = 0; b < BLOCKS; b++) { scores[b].at[c] = float2(0); }
    UNROLL for (int f = 0; f < D / FRAGMENT; f++) {
      const int key = c * FRAGMENT + place.column, element = f * FRAGMENT + place.row;
      const threadgroup T* at = keys + key * PITCH + element;
      const float2 fragment = float2(static_cast<float>(at[0]), static_cast<float>(at[PITCH]));
      UNROLL for (int b = 0; b < BLOCKS; b++) {
        multiply_add(scores[b].at[c], rows[b].query[f], fragment);
      }
    }
  }
}

// Turn scores into exponentials relative to the largest score yet, 0 for keys that are not seen.
template <int D>
METAL_FUNC void soften(thread Rows<D>& rows, thread Scores& scores, uint seen, Place place) {
  float largest = rows.largest;
  UNROLL for (int c = 0; c < TILE / FRAGMENT; c++) {
    const uint pair = seen >> (c * FRAGMENT + place.column);
    scores.at[c].x = pair & 1u ? scores.at[c].x : UNSEEN;
    scores.at[c].y = pair & 2u ? scores.at[c].y : UNSEEN;
    largest = metal::max(largest, metal::max(scores.at[c].x, scores.at[c].y));
  }
  largest = row_max(largest);
  float sum = 0;
  UNROLL for (int c = 0; c < TILE / FRAGMENT; c++) {
    const uint pair = seen >> (c * FRAGMENT + place.column);
    scores.at[c].x = pair & 1u ? metal::fast::exp2(scores.at[c].x - largest) : 0.0f;
    scores.at[c].y = pair & 2u ? metal::fast::exp2(scores.at[c].y - largest) : 0.0f;
    sum += scores.at[c].x + scores.at[c].y;
  }
  const float shrink = metal::fast::exp2(rows.largest - largest);
  rows.largest = largest;
  rows.total = rows.total * shrink + row_sum(sum);
  UNROLL for (int f = 0; f < D / FRAGMENT; f++) { rows.output[f] *= shrink; }
}

// Add the tile's values, weighted by the exponentials: P V.
template <typename T, int D, int BLOCKS>
METAL_FUNC void add_values(
    thread Rows<D>* rows, const threadgroup T* values, Place place, thread Scores* weights) {
  constexpr int PITCH = tile_pitch<T, D>();
  UNROLL for (int c = 0; c < TILE / FRAGMENT; c++) {
    UNROLL for (int f = 0; f < D / FRAGMENT; f++) {
      const int key = c * FRAGMENT + place.row, element = f * FRAGMENT + place.column;
      const threadgroup T* at = values + key * PITCH + element;
      const float2 fragment = float2(static_cast<float>(at[0]), static_cast<float>(at[1]));
      UNROLL for (int b = 0; b < BLOCKS; b++) {
        multiply_add(rows[b].output[f], weights[b].at[c], fragment);
      }
    }
  }
}

// Write a row's output, `factor` times, to [..., D] at `target`.
template <typename U, int D>
METAL_FUNC void store_row(thread const Rows<D>& rows, device U* target, float factor, Place place) {
  UNROLL for (int f = 0; f < D / FRAGMENT; f++) {
    const float2 pair = rows.output[f] * factor;
    target[f * FRAGMENT + place.column] = static_cast<U>(pair.x);
    target[f * FRAGMENT + place.column + 1] = static_cast<U>(pair.y);
  }
}

// The walk along tiles `first` to `last` - 1, the same for every simdgroup: all of them copy.
template <typename T, int D, int BLOCKS>
METAL_FUNC void attend(
    thread Rows<D>* rows, Side<T> keys, Side<T> values, Mask mask, int first, int last,
    Copy<T> copy, Place place) {
  for (int tile = first; tile < last; tile++) {
    uint seen[BLOCKS], any = 0;
    UNROLL for (int b = 0; b < BLOCKS; b++) {
      seen[b] = rows[b].row < 0 ? 0u : seen_keys(mask, rows[b].row, tile);
      any |= seen[b];
    }
    // The streams of other nodes fill whole tiles that no row of a simdgroup sees.
    const bool wanted = metal::simd_any(any != 0u);
    Scores weights[BLOCKS];

    copy_tile<T, D>(keys, mask.num_keys, tile, copy);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (wanted) {
      score<T, D, BLOCKS>(rows, copy.tile, place, weights);
      UNROLL for (int b = 0; b < BLOCKS; b++) { soften<D>(rows[b], weights[b], seen[b], place); }
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    copy_tile<T, D>(values, mask.num_keys, tile, copy);
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
    if (wanted) {
      add_values<T, D, BLOCKS>(rows, copy.tile, place, weights);
    }
    metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
  }
}
