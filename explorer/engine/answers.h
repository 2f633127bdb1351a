// One function a command. Each writes the members of its answer's object; errors leave it to the
// caller to write another.
#pragma once

#include "json.h"
#include "request.h"

namespace tessera::explorer {

Status answer_devices(const Request& request, Json& json);
Status answer_parse(const Request& request, Json& json);
Status answer_plan(const Request& request, Json& json);
Status answer_tiles(const Request& request, Json& json);
Status answer_elements(const Request& request, Json& json);
Status answer_order(const Request& request, Json& json);
Status answer_bytes(const Request& request, Json& json);
Status answer_softmax(const Request& request, Json& json);

}  // namespace tessera::explorer
