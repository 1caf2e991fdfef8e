#include "ranks/stage_communicator.h"

#include <utility>
#include <vector>

namespace adaptrt {
namespace {

/// Ranks [first, first + size) of another communicator.
class StageCommunicator final : public Communicator {
 public:
  StageCommunicator(std::shared_ptr<Communicator> all, std::int32_t first, std::int32_t size)
      : all_(std::move(all)), first_(first), size_(size) {}

  [[nodiscard]] std::int32_t rank() const override { return all_->rank() - first_; }
  [[nodiscard]] std::int32_t size() const override { return size_; }
  [[nodiscard]] bool is_lost() const override { return all_->is_lost(); }

  void exchange(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) override {
    translate(sent, received);
    all_->exchange(sent_, received_);
  }

  ExchangeNumber begin_exchange(std::span<const OutgoingMessage> sent,
                                std::span<const IncomingMessage> received) override {
    translate(sent, received);
    return all_->begin_exchange(sent_, received_);
  }
  [[nodiscard]] bool has_ended(ExchangeNumber exchange) override { return all_->has_ended(exchange); }
  void end_exchange(ExchangeNumber exchange) override { all_->end_exchange(exchange); }

  void wait_for(const IncomingMessage& message) override {
    all_->wait_for({message.from + first_, message.bytes});
  }

 private:
  void translate(std::span<const OutgoingMessage> sent, std::span<const IncomingMessage> received) {
    sent_.assign(sent.begin(), sent.end());
    for (OutgoingMessage& message : sent_) message.to += first_;
    received_.assign(received.begin(), received.end());
    for (IncomingMessage& message : received_) message.from += first_;
  }

  std::shared_ptr<Communicator> all_;
  std::int32_t first_;
  std::int32_t size_;
  std::vector<OutgoingMessage> sent_;
  std::vector<IncomingMessage> received_;
};

}  // namespace

std::shared_ptr<Communicator> communicator_of_stage(const Program& program,
                                                    const std::shared_ptr<Communicator>& all) {
  if (program.num_stages == 1) return all;
  const std::int32_t size = program.ranks_per_stage();
  return std::make_shared<StageCommunicator>(all, program.stage() * size, size);
}

}  // namespace adaptrt
