#pragma once

namespace adaptrt {

/// True if the CPU has AMX tile instructions for bfloat16 and 8-bit integers, even if the operating system is
/// too old to support them.
[[nodiscard]] bool cpu_has_amx();

/// True if this process may use AMX tiles: the CPU has them and Linux permits it (asked once per process).
/// Using tiles without the permission ends the process.
[[nodiscard]] bool amx_is_permitted();

}  // namespace adaptrt
