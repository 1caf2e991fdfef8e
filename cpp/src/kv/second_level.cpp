#include "adaptrt/kv/second_level.h"

namespace adaptrt {

BlockKey root_key(const Sha256Digest& fingerprint, const ReuseKey& key) {
  // Every field has a fixed length, so that no two keys give the same bytes.
  return Sha256()
      .add(fingerprint)
      .add_integer(key.adapter_generation == 0 ? 0 : 1)
      .add(key.adapter_digest)
      .add_integer(key.cache_salt ? 1 : 0)
      .add_integer(key.cache_salt.value_or(0))
      .add_integer(key.adapter_from)
      .add(key.given_digest)
      .finish();
}

BlockKey change_key(const BlockKey& before, const Sha256Digest& fingerprint, const ReuseKey& key) {
  return Sha256().add(before).add(root_key(fingerprint, key)).finish();
}

BlockKey block_key(const BlockKey& before, std::span<const std::int32_t> tokens) {
  return Sha256().add(before).add(tokens).finish();
}

}  // namespace adaptrt
