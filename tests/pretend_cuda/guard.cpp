// What torch asks of a CUDA device before any kernel runs: which device is current, and that one is there.
// Autograd and device contexts ask it in C++, so Python alone cannot stand in for it in a build without CUDA.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {
constexpr c10::DeviceIndex kDevices = 2;
thread_local c10::DeviceIndex current = 0;

c10::Stream only_stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    current = device.index();
    return before;
  }
  // One stream a device, on which everything has always finished: the values lie on the CPU.
  c10::Stream getStream(c10::Device device) const override { return only_stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return only_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return only_stream(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

Guard guard;
c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, &guard);

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  int getNumGPUs() const override { return kDevices; }
};
}  // namespace

namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, Hooks)
}
