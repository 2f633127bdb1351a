#include "engine.h"

#include "answers.h"

namespace tessera::explorer {
namespace {

constexpr struct {
  std::string_view name;
  Status (*answer)(const Request& request, Json& json);
} kCommands[] = {
    {"devices", answer_devices}, {"parse", answer_parse},       {"plan", answer_plan},
    {"tiles", answer_tiles},     {"elements", answer_elements}, {"order", answer_order},
    {"bytes", answer_bytes},     {"softmax", answer_softmax},
};

Status write(std::string_view line, Json& json) {
  const Result<Request> request = Request::read(line);
  if (!request) return request.status();
  std::string known;
  for (const auto& command : kCommands) {
    if (command.name == request->command()) return command.answer(*request, json);
    known += (known.empty() ? "" : ", ") + std::string(command.name);
  }
  return Status::invalid("command = '" + std::string(request->command()) +
                         "': unknown; known: " + known);
}

}  // namespace

std::string answer(std::string_view request) {
  Json json;
  json.begin_object();
  const Status status = write(request, json);
  if (status) return json.end_object().take();
  Json error;
  error.begin_object().key("error").begin_object();
  error.field("code", to_string(status.code)).field("text", status.text);
  return error.end_object().end_object().take();
}

}  // namespace tessera::explorer
