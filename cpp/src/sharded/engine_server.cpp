#include <cstdint>
#include <exception>
#include <span>
#include <utility>

#include "adaptrt/core/error.h"
#include "adaptrt/engine/engine_fields.h"
#include "adaptrt/sharded/remote_engine.h"
#include "command_server.h"
#include "struct_message.h"

namespace adaptrt {
namespace {

/// Sends step results to the executor's process, after a reply that says if there are any.
class EngineServer final : public CommandServer {
 public:
  using CommandServer::CommandServer;

  /// Sends the EngineInfo that the other end waits for before its first command.
  void describe() {
    MessageWriter message;
    add_struct(local().info(), &message);
    const std::uint64_t size = message.bytes().size();
    send(std::as_bytes(std::span(&size, 1)));
    send(message.bytes());
  }

 private:
  void step(const StepInput& input) override {
    send_reply(Outcome::kDone, {});
    has_replied_ = false;
    try {
      local().step(input, sink(local().info().logits_width()), sink(local().info().hidden_size));
    } catch (const StepError& error) {
      // After the first rows, the other end expects rows and cannot receive an error reply.
      if (has_replied_) throw;
      send_reply(Outcome::kStepError, error.what());
      return;
    } catch (const std::exception& error) {
      if (!has_replied_) send_reply(Outcome::kEngineError, error.what());
      throw;
    }
    if (!has_replied_) send_reply(Outcome::kDone, {});
    send_encoder_outputs(input.encoder);
  }

  void send_encoder_outputs(const EncoderInputs& inputs) {
    for (std::size_t i = 0; i < inputs.outputs.size(); ++i) {
      if (inputs.outputs[i] == nullptr) continue;
      const std::int64_t tokens = inputs.offsets[i + 1] - inputs.offsets[i];
      const std::int64_t floats = tokens * local().info().encoder_hidden_size;
      send(std::as_bytes(std::span<const float>(inputs.outputs[i], static_cast<std::size_t>(floats))));
    }
  }

  LogitsSink sink(std::int64_t width) {
    return [this, width](std::int64_t, std::int64_t rows, const float* values) {
      if (!std::exchange(has_replied_, true)) send_reply(Outcome::kDone, {});
      send(std::as_bytes(std::span(values, static_cast<std::size_t>(rows * width))));
    };
  }

  bool has_replied_ = false;
};

}  // namespace

void serve_engine(Engine& engine, Communicator& communicator) {
  EngineServer server(engine, communicator);
  server.describe();
  server.run();
}

}  // namespace adaptrt
