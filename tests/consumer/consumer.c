/* Uses the installed C ABI: caller-owned plan and workspace; two queries, causal, so that the first
 * returns the first value exactly. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <tessera/tessera.h>

static tessera_const_tensor tensor(const float* data) {
  tessera_const_tensor t;
  t.data = data;
  t.stride_batch = 8;
  t.stride_seqlen = 4;
  t.stride_head = 4;
  return t;
}

int main(void) {
  const float q[8] = {0}, k[8] = {1, 1, 1, 1, 1, 1, 1, 1}, v[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  float o[8];
  char error[256];
  tessera_problem problem;
  tessera_tensors tensors;
  tessera_plan* plan = NULL;
  size_t bytes;
  void* workspace;
  int i;

  tessera_problem_init(&problem, sizeof problem);
  if (tessera_problem_parse("fwd f32 b=1 h=1 q=2 k=2 d=4 causal", &problem, error, sizeof error) ||
      tessera_plan_create(&problem, NULL, &plan, error, sizeof error)) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  bytes = tessera_plan_workspace_bytes(plan);
  workspace = aligned_alloc(64, (bytes + 63) / 64 * 64 + 64);
  tessera_tensors_init(&tensors, sizeof tensors);
  tensors.q = tensor(q);
  tensors.k = tensor(k);
  tensors.v = tensor(v);
  tensors.o.data = o;
  tensors.o.stride_batch = 8;
  tensors.o.stride_seqlen = tensors.o.stride_head = 4;
  if (tessera_run(plan, &tensors, workspace, bytes, NULL, error, sizeof error)) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  for (i = 0; i < 4; ++i) {
    if (o[i] != v[i] || fabsf(o[4 + i] - (v[i] + v[4 + i]) / 2) > 1e-6F) {
      fprintf(stderr, "o[%d] = %g, o[%d] = %g\n", i, o[i], 4 + i, o[4 + i]);
      return 1;
    }
  }
  printf("tessera %s: %s\n", tessera_version(), tessera_plan_kernel(plan));
  tessera_plan_destroy(plan);
  free(workspace);
  return 0;
}
