#include <algorithm>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "lora_cache_impl.h"

namespace adaptrt {
namespace {

class Findings {
 public:
  // Texts are made only for violations: tests check every step, and would mostly make texts.
  void expect(bool holds, const char* what) {
    if (!holds) broken_.emplace_back(what);
  }
  void expect(bool holds, const CacheEntry& entry, const char* what) {
    if (holds) return;
    const HostAdapter& adapter = *entry.adapter;
    broken_.push_back("task " + std::to_string(adapter.task_id()) + " generation " +
                      std::to_string(adapter.generation()) + " " + what);
  }
  std::vector<std::string> take() { return std::move(broken_); }

 private:
  std::vector<std::string> broken_;
};

void check_entry(const CacheEntry& entry, bool refers_to_host, Findings& findings) {
  const bool absent = entry.residence == Residence::kAbsent;
  findings.expect(entry.users >= 0 && entry.leases >= 0, entry, "has a negative count");
  findings.expect(entry.listed || entry.in_use(), entry, "is neither listed nor in use");
  findings.expect(entry.residence != Residence::kLoading || entry.leases == 0, entry,
                  "is leased while it loads");
  findings.expect(entry.listed || !entry.pinned, entry, "is pinned but not listed");
  findings.expect(!absent || entry.leases == 0, entry, "is leased but not on the device");
  findings.expect(entry.pages.size() == (absent ? 0U : static_cast<std::size_t>(entry.plan.pages)), entry,
                  "has another number of pages than its plan");
  const bool has_copy = refers_to_host || entry.is_ready() || entry.residence == Residence::kFailed;
  findings.expect(has_copy == !entry.device.sites.empty(), entry,
                  "has a device copy exactly when it should not");
  findings.expect(entry.residence != Residence::kFailed || entry.leases > 0, entry,
                  "keeps pages after a failed load");
  findings.expect(*entry.host_place == &entry, entry, "is at another adapter's place of the host list");
  findings.expect(*entry.device_place == &entry, entry, "is at another adapter's place of the device list");
}

}  // namespace

std::vector<std::string> LoraCache::Impl::check_invariants() const {
  const std::lock_guard lock(mutex_);
  Findings findings;
  std::size_t host_bytes = 0;
  std::size_t unshared_bytes = 0;
  std::unordered_map<const SharedMatrix*, std::int64_t> users;
  std::int64_t idle_pages = 0;
  std::int64_t pinned_pages = 0;
  std::size_t listed = 0;
  std::int64_t loading = 0;
  std::multiset<std::int64_t> pages(free_pages_.pages().begin(), free_pages_.pages().end());
  for (const auto& [generation, entry] : entries_) {
    check_entry(*entry, refers_to_host_, findings);
    const bool absent = entry->residence == Residence::kAbsent;
    const bool idle = entry->residence == Residence::kResident && entry->leases == 0 && !entry->pinned;
    if (entry->is_loading()) ++loading;
    findings.expect(entry->adapter->generation() == generation, *entry, "is filed under another generation");
    findings.expect(entry->host_list == (entry->in_use() || entry->pinned ? &host_busy_ : &host_idle_),
                    *entry, "is in the wrong host list");
    findings.expect(entry->device_list == (absent ? &device_absent_
                                           : idle ? &device_idle_
                                                  : &device_busy_),
                    *entry, "is in the wrong device list");
    findings.expect(!entry->listed || find_listed(entry->adapter->task_id()) == entry.get(), *entry,
                    "is not found by its id");
    host_bytes += entry->adapter->own_bytes();
    unshared_bytes += entry->adapter->unshared_bytes();
    for (const auto& matrix : entry->adapter->matrices()) {
      if (++users[matrix.get()] == 1) host_bytes += matrix->memory_bytes();
    }
    if (idle) idle_pages += entry->plan.pages;
    if (entry->pinned) pinned_pages += entry->plan.pages;
    if (entry->listed) ++listed;
    pages.insert(entry->pages.begin(), entry->pages.end());
  }
  findings.expect(listed == listed_.size(), "the lookup holds ids that no adapter has");
  findings.expect(host_bytes == host_bytes_used_, "host_bytes_used is not the sum over the adapters");
  findings.expect(
      std::ranges::all_of(users, [](const auto& used) { return used.first->users == used.second; }),
      "users of a shared matrix are miscounted");
  findings.expect(unshared_bytes == unshared_bytes_ && host_bytes_used_ <= unshared_bytes_,
                  "saved bytes are miscounted");
  findings.expect(host_bytes_used_ <= host_bytes_total_, "the host level holds more than its size");
  findings.expect(host_bytes_total_ <= max_host_bytes_, "the host level is larger than its maximum");
  findings.expect(free_pages_.total() <= free_pages_.most(), "the device level is larger than its maximum");
  findings.expect(idle_pages == idle_pages_, "idle pages are miscounted");
  findings.expect(pinned_pages == pinned_pages_, "pinned pages are miscounted");
  findings.expect(pinned_pages_ <= free_pages_.total(), "more pages are pinned than there are");
  findings.expect(loading == loads_in_flight_, "loads in flight are miscounted");
  findings.expect(!refers_to_host_ || loading == 0, "an adapter loads that needs no copy");
  std::set<const CacheEntry*> queued;
  for (const LoadJob& job : queued_loads_) {
    findings.expect(queued.insert(job.entry).second, "an adapter waits twice for a load worker");
    const auto known =
        std::ranges::find_if(entries_, [&](const auto& item) { return item.second.get() == job.entry; });
    findings.expect(known != entries_.end() && job.entry->residence == Residence::kLoading,
                    "an adapter waits for a load worker and is not loading");
  }
  const auto has_outdated_first = [](const CacheEntry::List& list) {
    return std::ranges::is_partitioned(list, &CacheEntry::outdated);
  };
  findings.expect(has_outdated_first(host_idle_) && has_outdated_first(device_idle_),
                  "a current adapter would be evicted before an outdated one");
  findings.expect(host_busy_.size() + host_idle_.size() == entries_.size(), "the host lists miss adapters");
  findings.expect(device_absent_.size() + device_busy_.size() + device_idle_.size() == entries_.size(),
                  "the device lists miss adapters");
  findings.expect(pages.size() == static_cast<std::size_t>(free_pages_.total()),
                  "pages are lost or too many");
  const std::set<std::int64_t> distinct(pages.begin(), pages.end());
  findings.expect(distinct.size() == pages.size(), "a page has two owners");
  findings.expect(distinct.empty() || (*distinct.begin() >= 0 && *distinct.rbegin() < free_pages_.total()),
                  "a page is out of range");
  return findings.take();
}

}  // namespace adaptrt
