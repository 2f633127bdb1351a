#include "cuda/backend.h"
namespace tessera::cuda {
Status quantize(const QuantizeShape&, const QuantizeTensors&, const Device&, const Execution&) {
  return Status::unsupported("quantize: not yet");
}
}  // namespace tessera::cuda
