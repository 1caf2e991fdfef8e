#pragma once

namespace adaptrt {

/// Whether this process may use AMX's tiles: the CPU multiplies bfloat16 and 8-bit integers in them, and
/// Linux, which is asked once a process, permits it. Using tiles without the permission ends the process.
[[nodiscard]] bool amx_is_permitted();

}  // namespace adaptrt
