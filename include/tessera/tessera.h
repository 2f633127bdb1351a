/* Tessera's C ABI. Stable within a major version: structures start with `size`, which the *_init
 * functions set, so that later versions may append fields; enumerators keep their values.
 *
 * Functions that can fail return a code and write one sentence to `error` (always terminated, cut
 * to error_size; may be NULL). Nothing throws, exits, or keeps pointers after returning.
 *
 * C11 (a structure has unnamed unions) or C++. */
#ifndef TESSERA_TESSERA_H_
#define TESSERA_TESSERA_H_

#include <stddef.h>
#include <stdint.h>

#include "tessera/export.h"
#include "tessera/version.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Version of this header: major * 10000 + minor * 100 + patch. */
#define TESSERA_H_VERSION \
  (TESSERA_VERSION_MAJOR * 10000 + TESSERA_VERSION_MINOR * 100 + TESSERA_VERSION_PATCH)

/** What kind of failure a call met. */
typedef enum tessera_code {
  TESSERA_OK = 0,
  TESSERA_INVALID = 1,     /**< an argument makes no sense */
  TESSERA_UNSUPPORTED = 2, /**< no kernel of the device does this */
  TESSERA_WORKSPACE = 3,   /**< the workspace is missing, too small or misaligned */
  TESSERA_DEVICE = 4       /**< the machine or the operating system refused */
} tessera_code;

typedef enum tessera_pass { TESSERA_FORWARD = 0, TESSERA_BACKWARD = 1 } tessera_pass;

typedef enum tessera_dtype {
  TESSERA_F32 = 0,
  TESSERA_BF16 = 1,
  TESSERA_F16 = 2,
  TESSERA_E4M3 = 3, /**< 8 bits, with scales */
  TESSERA_I8 = 4    /**< 8 bits, with scales */
} tessera_dtype;

/** Which elements of an 8-bit tensor share a scale; tessera::Scaling in types.hpp. */
typedef enum tessera_scaling {
  TESSERA_SCALE_NONE = 0,
  TESSERA_SCALE_TENSOR = 1,
  TESSERA_SCALE_HEAD = 2,
  TESSERA_SCALE_TOKEN = 3,
  TESSERA_SCALE_BLOCK = 4,
  TESSERA_SCALE_CHANNEL = 5,
  TESSERA_SCALE_GROUP = 6
} tessera_scaling;

typedef enum tessera_alignment {
  TESSERA_BOTTOM_RIGHT = 0, /**< query i sits at key position i + seqlen_k - seqlen_q */
  TESSERA_TOP_LEFT = 1      /**< query i sits at key position i */
} tessera_alignment;

typedef enum tessera_per_head {
  TESSERA_PER_HEAD_NONE = 0,
  TESSERA_PER_HEAD_HEADS = 1,      /**< (num_heads) */
  TESSERA_PER_HEAD_BATCH_HEADS = 2 /**< (batch, num_heads) */
} tessera_per_head;

/** Whether k and v are a cache, and what its lengths count; tessera::CacheShape in problem.hpp. */
typedef enum tessera_cache_lengths {
  TESSERA_NO_CACHE = 0,
  TESSERA_CACHE_FULL = 1,  /**< there are no lengths */
  TESSERA_CACHE_AFTER = 2, /**< filled slots, this step's keys among them */
  TESSERA_CACHE_BEFORE = 3 /**< filled slots without them */
} tessera_cache_lengths;

typedef enum tessera_page_ids { TESSERA_PAGE_I32 = 0, TESSERA_PAGE_I64 = 1 } tessera_page_ids;

/** Which dimensions of the bias are stored; the others have size 1 and are broadcast. */
enum {
  TESSERA_BIAS_BATCH = 1,
  TESSERA_BIAS_HEADS = 2,
  TESSERA_BIAS_QUERIES = 4,
  TESSERA_BIAS_KEYS = 8
};

/** One attention problem; tessera::Problem in problem.hpp describes each field. Initialise with
 * tessera_problem_init, then set sizes. */
typedef struct tessera_problem {
  size_t size;             /**< set by tessera_problem_init */
  int32_t pass;            /**< tessera_pass */
  int32_t dtype;           /**< tessera_dtype */
  int64_t batch;           /**< sequences */
  int64_t num_heads;       /**< of q and o */
  int64_t num_heads_k;     /**< of k and v */
  int64_t seqlen_q;        /**< packed: the longest */
  int64_t seqlen_k;        /**< packed: the longest */
  int64_t head_dim;        /**< of q and k */
  int64_t head_dim_v;      /**< of v and o */
  int32_t packed;          /**< 0 or 1 */
  int32_t alignment;       /**< tessera_alignment */
  int64_t total_q;         /**< packed only */
  int64_t total_k;         /**< packed only */
  float softmax_scale;     /**< NaN (the initial value): 1 / sqrt(head_dim); see qv */
  float softcap;           /**< 0: none */
  int64_t window_left;     /**< -1: unbounded */
  int64_t window_right;    /**< -1: unbounded; causal: 0 */
  int32_t alibi;           /**< tessera_per_head */
  int32_t has_bias;        /**< 0 or 1 */
  uint32_t bias_dims;      /**< TESSERA_BIAS_* */
  int32_t bias_dtype;      /**< TESSERA_F32 or the problem's dtype */
  int32_t sink;            /**< 0 or 1 */
  float dropout_p;         /**< [0, 1) */
  int32_t deterministic;   /**< 0 or 1 */
  int32_t batch_invariant; /**< 0 or 1 */
  int32_t unaligned;       /**< 0 or 1 */
  int32_t dtype_o;         /**< tessera_dtype of o; -1 (the initial value): the problem's dtype */
  int32_t cache;           /**< tessera_cache_lengths */
  int32_t page_ids;        /**< tessera_page_ids */
  int64_t seqlen_new;      /**< lengths before: new keys a sequence; packed: of the longest */
  int64_t page_size;       /**< slots of a page; 0: rows, without pages */
  int64_t num_pages;       /**< paged only */
  int64_t cache_rows;      /**< rows that the cache's index picks from; 0: sequence b has row b */
  int64_t chunk;           /**< queries see keys of their own chunk of so many; 0: all */
  int64_t sink_tokens;     /**< first keys that are seen whatever the window's left end is */
  int32_t leftpad;         /**< 0 or 1 */
  int32_t tree;            /**< 0 or 1 */
  int32_t dtype_v;         /**< tessera_dtype of v; -1 (the initial value): the problem's dtype */
  int32_t scale_q;         /**< tessera_scaling of q */
  int32_t scale_k;         /**< tessera_scaling of k */
  int32_t scale_v;         /**< tessera_scaling of v */
  int64_t scale_block_k;   /**< keys that share a scale of k, iff by block */
  int64_t scale_block_v;   /**< keys that share a scale of v, iff by block; columns, iff by group */
  int32_t score_shift;     /**< 0 or 1 */
  int32_t v_shift;         /**< 0 or 1 */
  int32_t v_tiles;         /**< 0 or 1: v, of e4m3, lies in tiles, as quantising makes them */
  int32_t dtype_kv;        /**< TESSERA_E4M3 or TESSERA_I8 of k and v; 0: the problem's dtype */
  int64_t qv;              /**< 0 or 1: scores are q . k + qv . v, by default over
                                sqrt(head_dim + head_dim_v) */
  int64_t skip_pages;      /**< 0 or 1: no query sees keys of pages with numbers below 0 */
  int64_t prefix_levels;   /**< 0 to 4: prefixes of prefixes in pages that neighbouring sequences
                                share, which a GPU may read once */
} tessera_problem;

/** A (batch, seqlen, heads, head_dim) tensor that is only read, packed (total, heads, head_dim);
 * strides in elements, the last one is 1. */
typedef struct tessera_const_tensor {
  const void* data; /**< the first element */
  /** From one element of a dimension to the next. @{ */
  int64_t stride_batch;
  int64_t stride_seqlen;
  int64_t stride_head;
  /** @} */
} tessera_const_tensor;

/** The same, written to. */
typedef struct tessera_tensor {
  void* data; /**< the first element */
  /** From one element of a dimension to the next. @{ */
  int64_t stride_batch;
  int64_t stride_seqlen;
  int64_t stride_head;
  /** @} */
} tessera_tensor;

/** A (batch, num_heads, seqlen_q, seqlen_k) bias; strides of broadcast dimensions are ignored. */
typedef struct tessera_const_bias {
  const void* data; /**< the first element */
  /** From one element of a dimension to the next. @{ */
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_query;
  int64_t stride_key;
  /** @} */
} tessera_const_bias;

/** The gradient of a bias. */
typedef struct tessera_bias {
  void* data; /**< the first element */
  /** From one element of a dimension to the next. @{ */
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_query;
  int64_t stride_key;
  /** @} */
} tessera_bias;

/** Scales of an 8-bit tensor, or a shift: fp32 numbers of the shape that tessera_scaling has, the
 * last dimension contiguous. */
typedef struct tessera_const_scales {
  const float* data; /**< the first number */
  /** From one number of a dimension to the next. @{ */
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_seqlen; /**< of k and v by token or group; else ignored */
  /** @} */
} tessera_const_scales;

/** The same, to be written or read. */
typedef struct tessera_scales {
  float* data; /**< the first number */
  /** From one number of a dimension to the next. @{ */
  int64_t stride_batch;
  int64_t stride_head;
  int64_t stride_seqlen; /**< of k and v by token; else ignored */
  /** @} */
} tessera_scales;

/** Where the sequences of a cache lie; tessera::CacheTensors in tensors.hpp describes each field.
 */
typedef struct tessera_cache {
  const int32_t* seqlens;        /**< (batch) */
  const int32_t* cu_seqlens_new; /**< (batch + 1) */
  const void* page_table;        /**< (rows or batch, pages of a sequence) page numbers */
  int64_t stride_page_table;     /**< from one row to the next */
  const int32_t* index;          /**< (batch) */
  const int32_t* leftpad;        /**< (batch) */
} tessera_cache;

/** Everything a run reads and writes; tessera::Tensors in tensors.hpp says which field is required
 * when. `saved_o` and `saved_softmax_lse` are what a backward reads: `o` and `softmax_lse`, const.
 */
typedef struct tessera_tensors {
  size_t size; /**< set by tessera_tensors_init */
  /** As in tessera::Tensors. @{ */
  tessera_const_tensor q;
  tessera_const_tensor k;
  tessera_const_tensor v;
  union {
    tessera_tensor o;             /**< forward: written */
    tessera_const_tensor saved_o; /**< backward: read */
  };
  union {
    float* softmax_lse;             /**< forward: written unless NULL */
    const float* saved_softmax_lse; /**< backward: read */
  };
  tessera_const_bias bias;
  const float* alibi_slopes;
  const float* sink;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  uint64_t philox_seed;
  uint64_t philox_offset;
  tessera_const_tensor dout;
  const float* dsoftmax_lse;
  tessera_tensor dq;
  tessera_tensor dk;
  tessera_tensor dv;
  tessera_bias dbias;
  float* dsink;
  tessera_cache cache;
  const uint64_t* tree_mask;
  tessera_const_scales q_scale;
  tessera_const_scales k_scale;
  tessera_const_scales v_scale;
  tessera_const_scales score_shift;
  tessera_const_scales v_shift;
  tessera_const_tensor qv;
  /** @} */
} tessera_tensors;

/** Where worker threads come from; tessera::Executor in executor.hpp states the contract of `run`.
 */
typedef struct tessera_executor {
  size_t size;         /**< sizeof(tessera_executor) */
  int32_t num_threads; /**< how many workers may run at the same time */
  void* self;          /**< passed to run */
  /** Must not be NULL. */
  void (*run)(void* self, int num_workers, void (*work)(void* context, int worker), void* context);
} tessera_executor;

/** How a run is executed; nothing here changes its result. tessera::Execution in tessera.hpp
 * describes each field. Initialise with tessera_execution_init. */
typedef struct tessera_execution {
  size_t size;                      /**< set by tessera_execution_init */
  const tessera_executor* executor; /**< CPU; NULL: the process-wide pool */
  /** Called now and then with done <= total; may be NULL. */
  void (*progress)(void* context, int64_t done, int64_t total);
  void* progress_context; /**< passed to progress */
  void* stream;           /**< GPU: the CUstream to enqueue on; NULL: the default stream */
} tessera_execution;

/** A plan: immutable, usable from several threads at once. */
typedef struct tessera_plan tessera_plan;

/** Sets every field to its default, and `size`. Call as tessera_problem_init(&p, sizeof p). */
TESSERA_API void tessera_problem_init(tessera_problem* problem, size_t size);
/** Sets every field to zero, and `size`. */
TESSERA_API void tessera_tensors_init(tessera_tensors* tensors, size_t size);
/** Sets every field to zero, and `size`. */
TESSERA_API void tessera_execution_init(tessera_execution* execution, size_t size);

/** Chooses a kernel. `device`: a name as in `tessera info`, NULL is this CPU. On success *plan must
 * be released with tessera_plan_destroy; on failure it is NULL. */
TESSERA_API tessera_code tessera_plan_create(const tessera_problem* problem, const char* device,
                                             tessera_plan** plan, char* error, size_t error_size);
TESSERA_API void tessera_plan_destroy(tessera_plan* plan);
/** Bytes of workspace tessera_run needs, aligned to 64. */
TESSERA_API size_t tessera_plan_workspace_bytes(const tessera_plan* plan);
/** Name of the chosen kernel; lives as long as the plan. */
TESSERA_API const char* tessera_plan_kernel(const tessera_plan* plan);

/** Loads all code that runs of the plan need on its GPU, and compiles what the build does not have:
 * for before a stream is captured. As tessera::prepare in code.hpp. */
TESSERA_API tessera_code tessera_prepare(const tessera_plan* plan, char* error, size_t error_size);

/** Runs a plan. `execution`: NULL is all defaults. On a GPU all pointers are device memory; the
 * work is enqueued and not waited for. */
TESSERA_API tessera_code tessera_run(const tessera_plan* plan, const tessera_tensors* tensors,
                                     void* workspace, size_t workspace_bytes,
                                     const tessera_execution* execution, char* error,
                                     size_t error_size);

/** Plans for the device and runs with a workspace of its own. `device`: a name as in `tessera
 * info`; NULL is the device that q lies on, as tessera::attend in tessera.hpp says. `execution` as
 * above. */
TESSERA_API tessera_code tessera_attend(const tessera_problem* problem,
                                        const tessera_tensors* tensors, const char* device,
                                        const tessera_execution* execution, char* error,
                                        size_t error_size);

/** The sizes of partial results: tessera::PartialResults in partial.hpp describes each field.
 * Initialise with tessera_partial_results_init. */
typedef struct tessera_partial_results {
  size_t size;        /**< set by tessera_partial_results_init */
  int32_t dtype;      /**< tessera_dtype of the parts' outputs */
  int32_t dtype_o;    /**< tessera_dtype of the merged output */
  int64_t num_splits; /**< parts of a row */
  int64_t batch;      /**< sequences; packed: 1 */
  int64_t seqlen_q;   /**< packed: total_q */
  int64_t num_heads;  /**< of queries */
  int64_t head_dim_v; /**< of o */
} tessera_partial_results;

/** (num_splits, batch, seqlen_q, num_heads, head_dim_v) parts; the stride of the last dimension
 * is 1.
 */
typedef struct tessera_const_partial_rows {
  const void* data; /**< the first element */
  /** From one element of a dimension to the next. @{ */
  int64_t stride_split;
  int64_t stride_batch;
  int64_t stride_seqlen;
  int64_t stride_head;
  /** @} */
} tessera_const_partial_rows;

/** An fp32 number for each of their rows. */
typedef struct tessera_const_partial_lse {
  const float* data; /**< the first element */
  /** From one element of a dimension to the next. @{ */
  int64_t stride_split;
  int64_t stride_batch;
  int64_t stride_seqlen;
  int64_t stride_head;
  /** @} */
} tessera_const_partial_lse;

/** The merged softmax_lse. */
typedef struct tessera_lse {
  float* data; /**< the first element; NULL: not written */
  /** From one element of a dimension to the next. @{ */
  int64_t stride_batch;
  int64_t stride_seqlen;
  int64_t stride_head;
  /** @} */
} tessera_lse;

/** What tessera_combine reads and writes, as in tessera::PartialTensors. */
typedef struct tessera_partial_tensors {
  size_t size;                         /**< set by tessera_partial_tensors_init */
  tessera_const_partial_rows o_parts;  /**< of type dtype */
  tessera_const_partial_lse lse_parts; /**< -inf: the part gives nothing */
  tessera_tensor o;                    /**< of type dtype_o */
  tessera_lse softmax_lse;             /**< optional */
} tessera_partial_tensors;

/** Sets every field to its default, and `size`. */
TESSERA_API void tessera_partial_results_init(tessera_partial_results* results, size_t size);
/** Sets every field to zero, and `size`. */
TESSERA_API void tessera_partial_tensors_init(tessera_partial_tensors* tensors, size_t size);

/** Merges partial results; tessera::combine in tessera.hpp says how. `device`: a name as in
 * `tessera info`; NULL is the device that o_parts lies on. `execution`: NULL is all defaults. */
TESSERA_API tessera_code tessera_combine(const tessera_partial_results* results,
                                         const tessera_partial_tensors* tensors, const char* device,
                                         const tessera_execution* execution, char* error,
                                         size_t error_size);

/** Type of positions that are given row by row. */
typedef enum tessera_position_type {
  TESSERA_POSITION_I32 = 0,
  TESSERA_POSITION_I64 = 1
} tessera_position_type;

/** One append of new keys and values to a cache: tessera::AppendShape in append.hpp describes each
 * field. Initialise with tessera_append_shape_init. */
typedef struct tessera_append_shape {
  size_t size;                  /**< set by tessera_append_shape_init */
  int32_t dtype;                /**< tessera_dtype of queries, new rows and most caches */
  int32_t cache;                /**< tessera_cache_lengths; slot_mapping: TESSERA_CACHE_FULL */
  int64_t batch;                /**< sequences */
  int64_t num_heads;            /**< of queries; 0: none are rotated */
  int64_t num_heads_k;          /**< of keys and values */
  int64_t seqlen_q;             /**< packed: the longest */
  int64_t seqlen_k;             /**< slots of a sequence */
  int64_t head_dim;             /**< of queries and keys */
  int64_t head_dim_v;           /**< of values */
  int64_t seqlen_new;           /**< new rows of a sequence; packed_new: of the longest */
  int64_t page_size;            /**< slots of a page; 0: rows, without pages */
  int64_t num_pages;            /**< with pages only */
  int64_t cache_rows;           /**< that cache.index picks from; 0: sequence b has row b */
  int32_t page_ids;             /**< tessera_page_ids */
  int32_t packed;               /**< 0 or 1: queries are (total_q, num_heads, head_dim) */
  int64_t total_q;              /**< packed only */
  int64_t total_new;            /**< packed_new only */
  int32_t packed_new;           /**< 0 or 1: the same of new rows */
  int32_t slot_mapping;         /**< 0 or 1: rows have slots and positions of their own */
  int64_t rotary_dim;           /**< columns that are rotated; 0: none */
  int64_t rotary_positions;     /**< rows of the tables */
  int32_t rotary_dtype;         /**< tessera_dtype of the tables: TESSERA_F32 or dtype */
  int32_t rotary_interleaved;   /**< 0 or 1: pairs are neighbours, not in the halves */
  int32_t rotary_constant_q;    /**< 0 or 1: a sequence's queries have one position */
  int32_t rotary_position_type; /**< tessera_position_type */
  int32_t dtype_kv;             /**< TESSERA_E4M3 or TESSERA_I8 of the cache; 0: dtype */
  int32_t scale_k;              /**< tessera_scaling of k, of a cache of 8 bits */
  int32_t scale_v;              /**< the same of v */
  int32_t reserved;             /**< 0 */
} tessera_append_shape;

/** What tessera_append reads and writes, as in tessera::AppendTensors. */
typedef struct tessera_append_tensors {
  size_t size; /**< set by tessera_append_tensors_init */
  /** As in tessera::AppendTensors. @{ */
  tessera_const_tensor k_new;
  tessera_const_tensor v_new;
  tessera_tensor k;
  tessera_tensor v;
  tessera_const_tensor q;
  tessera_tensor q_out;
  tessera_cache cache; /**< leftpad is not looked at */
  const int32_t* cu_seqlens_q;
  const int64_t* slot_mapping;
  const void* rotary_cos;
  const void* rotary_sin;
  int64_t stride_rotary_cos;
  int64_t stride_rotary_sin;
  const int32_t* rotary_seqlens;
  const void* rotary_positions;
  tessera_scales k_scale;
  tessera_scales v_scale;
  /** @} */
} tessera_append_tensors;

/** Sets every field to its default, and `size`. */
TESSERA_API void tessera_append_shape_init(tessera_append_shape* shape, size_t size);
/** Sets every field to zero, and `size`. */
TESSERA_API void tessera_append_tensors_init(tessera_append_tensors* tensors, size_t size);

/** Appends to a cache; tessera::append in tessera.hpp says how. `device`: a name as in `tessera
 * info`; NULL is the device that the cache lies on. `execution`: NULL is all defaults. */
TESSERA_API tessera_code tessera_append(const tessera_append_shape* shape,
                                        const tessera_append_tensors* tensors, const char* device,
                                        const tessera_execution* execution, char* error,
                                        size_t error_size);

/** What is quantised, and of what: tessera::QuantizeShape in quantize.hpp describes each field.
 * Initialise with tessera_quantize_shape_init. */
typedef struct tessera_quantize_shape {
  size_t size;                    /**< set by tessera_quantize_shape_init */
  const tessera_problem* problem; /**< that the results are for */
  int32_t dtype;                  /**< tessera_dtype of q, k and v as they come */
  int32_t hadamard;               /**< columns of a block of the transform; 0: none */
  int32_t signs;                  /**< 0 or 1 */
  int32_t rotary_dtype;           /**< tessera_dtype of the tables: TESSERA_F32 or dtype */
  int64_t rotary_dim;             /**< columns that are rotated; 0: none */
  int64_t rotary_positions;       /**< rows of the tables */
  int32_t rotary_interleaved;     /**< 0 or 1: pairs are neighbours, not in the halves */
  int32_t rotary_constant_q;      /**< 0 or 1: a sequence's queries have one position */
} tessera_quantize_shape;

/** What tessera_quantize reads and writes, as in tessera::QuantizeTensors. */
typedef struct tessera_quantize_tensors {
  size_t size; /**< set by tessera_quantize_tensors_init */
  /** As in tessera::QuantizeTensors. @{ */
  tessera_const_tensor q;
  tessera_const_tensor k;
  tessera_const_tensor v;
  tessera_tensor q_out;
  tessera_tensor k_out;
  tessera_tensor v_out;
  tessera_scales q_scale;
  tessera_scales k_scale;
  tessera_scales v_scale;
  tessera_const_scales k_mean;
  tessera_scales score_shift;
  tessera_const_scales v_shift;
  const float* signs;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const void* rotary_cos;
  const void* rotary_sin;
  int64_t stride_rotary_cos;
  int64_t stride_rotary_sin;
  const int32_t* rotary_seqlens;
  /** @} */
} tessera_quantize_tensors;

/** Sets every field to its default, and `size`. */
TESSERA_API void tessera_quantize_shape_init(tessera_quantize_shape* shape, size_t size);
/** Sets every field to zero, and `size`. */
TESSERA_API void tessera_quantize_tensors_init(tessera_quantize_tensors* tensors, size_t size);

/** Makes 8-bit tensors and their scales; tessera::quantize in tessera.hpp says how. `device`: a
 * name as in `tessera info`; NULL is the device that q lies on (k, v). `execution`: NULL is all
 * defaults.
 */
TESSERA_API tessera_code tessera_quantize(const tessera_quantize_shape* shape,
                                          const tessera_quantize_tensors* tensors,
                                          const char* device, const tessera_execution* execution,
                                          char* error, size_t error_size);

/** Whether a GPU needs the problem to be `unaligned` for these tensors; tessera::needs_unaligned in
 * tensors.hpp says when. *unaligned gets 0 or 1. */
TESSERA_API tessera_code tessera_needs_unaligned(const tessera_problem* problem,
                                                 const tessera_tensors* tensors, int32_t* unaligned,
                                                 char* error, size_t error_size);

/** Writes the planner's table for the problem into `text` (always terminated, cut to text_size) and
 * returns the length it would have, like snprintf; 0 if the arguments are unusable. */
TESSERA_API size_t tessera_explain(const tessera_problem* problem, const char* device, char* text,
                                   size_t text_size);
/** The problem's one-line form, in the same way. */
TESSERA_API size_t tessera_problem_print(const tessera_problem* problem, char* text,
                                         size_t text_size);
/** Reads the one-line form into an initialised problem. */
TESSERA_API tessera_code tessera_problem_parse(const char* text, tessera_problem* problem,
                                               char* error, size_t error_size);

/** Which weights dropout keeps in every run with this philox_seed and philox_offset: `keep` gets 1
 * (kept) or 0 in (batch, num_heads, seqlen_q, seqlen_k) bytes of host memory. */
TESSERA_API tessera_code tessera_dropout_mask(const tessera_problem* problem, uint64_t seed,
                                              uint64_t offset, uint8_t* keep, char* error,
                                              size_t error_size);

/** What a machine reaches in simple loops; tessera::Peaks in tessera.hpp describes the fields. */
typedef struct tessera_peaks {
  size_t size;       /**< sizeof(tessera_peaks), set by the caller */
  double f32_flops;  /**< per second */
  double bf16_flops; /**< per second */
  double read_bytes; /**< per second */
} tessera_peaks;

/** Measures them, for about `seconds` each; `device` and `executor` as above. */
TESSERA_API tessera_code tessera_measure_peaks(const char* device, double seconds,
                                               const tessera_executor* executor,
                                               tessera_peaks* peaks, char* error,
                                               size_t error_size);

/** Of the library: "MAJOR.MINOR.PATCH", as version.h has them of the headers. */
TESSERA_API const char* tessera_version(void);

#ifdef __cplusplus
}
#endif

#endif /* TESSERA_TESSERA_H_ */
