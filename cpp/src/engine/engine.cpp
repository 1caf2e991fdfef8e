#include "adaptrt/engine/engine.h"

#include "adaptrt/core/error.h"
#include "adaptrt/lora/host_pages.h"

namespace adaptrt {

std::unique_ptr<AdapterPages> Engine::make_adapter_pages(std::size_t page_bytes, std::int64_t num_pages,
                                                         std::int32_t /*num_copy_streams*/) {
  return std::make_unique<HostPages>(page_bytes, num_pages);
}

void Engine::begin_ahead(const StepInput& /*input*/, std::span<const std::int32_t> /*previous_rows*/) {
  throw EngineError("the engine cannot begin a step ahead");
}

void Engine::allocate_cross_kv_blocks(std::int32_t /*num_blocks*/) {
  throw EngineError("the engine has no encoder");
}

void Engine::allocate_states(std::int32_t /*num_slots*/) {
  throw EngineError("the engine keeps no states");
}

void Engine::read_kv_block(std::int32_t /*block*/, std::span<std::byte> /*bytes*/) const {
  throw EngineError("the engine's KV blocks cannot be read");
}

void Engine::write_kv_block(std::int32_t /*block*/, std::span<const std::byte> /*bytes*/) {
  throw EngineError("the engine's KV blocks cannot be written");
}

void Engine::read_states(std::int32_t /*slot*/, std::span<std::byte> /*bytes*/) const {
  throw EngineError("the engine's states cannot be read");
}

void Engine::write_states(std::int32_t /*slot*/, std::span<const std::byte> /*bytes*/) {
  throw EngineError("the engine's states cannot be written");
}

}  // namespace adaptrt
