#include "second_level.h"

#include <algorithm>
#include <cstddef>
#include <new>
#include <span>
#include <string>

#include "adaptrt/core/error.h"
#include "adaptrt/kv/state_pool.h"

namespace adaptrt {
namespace {

/// Returns the number of blocks or snapshots that may wait, as copies, to be written: as many as a long
/// prompt evicts, within memory that small machines can spare.
std::int32_t num_write_buffers(std::int32_t num_kv_blocks, std::size_t block_bytes) {
  constexpr std::size_t kMostBytes = std::size_t{256} << 20;
  constexpr std::int32_t kPoolShare = 8;
  constexpr std::int32_t kFew = 16;
  const auto affordable = static_cast<std::int32_t>(
      std::min(kMostBytes / std::max(block_bytes, std::size_t{1}), std::size_t{1} << 30));
  const std::int32_t wanted = std::max(num_kv_blocks / kPoolShare, std::min(num_kv_blocks, kFew));
  return std::max(1, std::min(wanted, affordable));
}

Sha256Digest fingerprint_of(const EngineInfo& engine) {
  Sha256 hash;
  for (const std::string& text : {engine.kv_identity, engine.kernels})
    hash.add_integer(text.size()).add(text);
  hash.add_integer(static_cast<std::uint64_t>(engine.dtype));
  hash.add_integer(static_cast<std::uint64_t>(engine.tokens_per_block));
  hash.add_integer(engine.kv_block_bytes);
  return hash.finish();
}

KvFileLayout layout_of(const KvCacheConfig& config, const EngineInfo& engine) {
  const std::size_t size = config.host_cache_size.value();
  return {.fingerprint = fingerprint_of(engine),
          .tokens_per_block = engine.tokens_per_block,
          .block_bytes = engine.kv_block_bytes,
          .max_bytes = engine.has_states() ? size / 2 : size};
}

KvFileLayout layout_of_states(const KvCacheConfig& config, const EngineInfo& engine) {
  KvFileLayout layout = layout_of(config, engine);
  layout.content = KvFileContent::kStates;
  layout.block_bytes = engine.state_bytes;
  return layout;
}

/// num_units: number of blocks or snapshots of the first level.
std::unique_ptr<KvFileLevel> make_level(const KvCacheConfig& config, const KvFileLayout& layout,
                                        std::int32_t num_units, KvBlockAccess access) {
  KvFileLevelOptions options;
  options.directory = config.host_cache_dir.value();
  options.layout = layout;
  options.num_write_buffers = num_write_buffers(num_units, layout.block_bytes);
  try {
    return std::make_unique<KvFileLevel>(options, std::move(access));
  } catch (const std::bad_alloc&) {
    throw ConfigError("no memory for the KV blocks that wait to be written to " + options.directory);
  }
}

}  // namespace

void check_second_level_size(const KvCacheConfig& config, const EngineInfo& engine) {
  if (!config.has_second_level()) return;
  if (!engine.has_states()) return check_file_size(layout_of(config, engine));
  const std::size_t least = 2 * std::max(least_file_size(layout_of(config, engine)),
                                         least_file_size(layout_of_states(config, engine)));
  if (*config.host_cache_size >= least) return;
  throw ConfigError("host_cache_size is " + std::to_string(*config.host_cache_size) +
                    "; one KV block and the states of a sequence take " + std::to_string(least) +
                    " bytes in two files of equal size");
}

std::unique_ptr<KvFileLevel> make_second_level(const KvCacheConfig& config, Engine& engine,
                                               std::int32_t num_kv_blocks) {
  if (!config.has_second_level()) return nullptr;
  const EngineInfo& info = engine.info();
  check_second_level_size(config, info);
  return make_level(
      config, layout_of(config, info), num_kv_blocks,
      {.read = [&engine](BlockId block, std::span<std::byte> bytes) { engine.read_kv_block(block, bytes); },
       .write = [&engine](BlockId block,
                          std::span<const std::byte> bytes) { engine.write_kv_block(block, bytes); }});
}

std::unique_ptr<KvFileLevel> make_second_level_of_states(const KvCacheConfig& config, Engine& engine,
                                                         std::int32_t num_snapshots) {
  const EngineInfo& info = engine.info();
  if (!config.has_second_level() || !info.has_states()) return nullptr;
  return make_level(
      config, layout_of_states(config, info), num_snapshots,
      {.read = [&engine](StateSlot slot, std::span<std::byte> bytes) { engine.read_states(slot, bytes); },
       .write = [&engine](StateSlot slot,
                          std::span<const std::byte> bytes) { engine.write_states(slot, bytes); }});
}

}  // namespace adaptrt
