// What PyTorch asks of a GPU besides its kernels: is there one, which is current, which queue?
//
// Fake tensors (shapes without data) need no kernels. But autograd starts a thread for each device,
// and autocast, FSDP and the compiler ask which device is current. On a machine without a GPU
// nobody answers. Here somebody does: there is one, number 0, with one queue, and every event on it
// is over. fake_gpu.py compiles this file against the installed PyTorch.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::EventFlag;
using c10::Stream;

const Device gpu(DeviceType::CUDA, 0);
const Stream queue(Stream::DEFAULT, gpu);

// The current device and its streams: c10's interface, which each kind of device implements.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  DeviceIndex deviceCount() const noexcept override { return 1; }

  Device getDevice() const override { return gpu; }
  Device exchangeDevice(Device) const override { return gpu; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}

  Stream getStream(Device) const noexcept override { return queue; }
  Stream getDefaultStream(Device) const override { return queue; }
  Stream getNewStream(Device, int) const override { return queue; }
  Stream getStreamFromGlobalPool(Device, bool) const override { return queue; }
  Stream exchangeStream(Stream) const noexcept override { return queue; }

  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
};

// Whether CUDA is there: ATen's interface. PyTorch asks for it once, while it is imported, so this
// library must be loaded before. Preferred to the hooks that PyTorch for CUDA or ROCm brings.
struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
};

}  // namespace

namespace at {
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, Hooks)
}

// Called after PyTorch is imported: of several guards for one kind of device the last one counts.
extern "C" void register_guard() {
  static Guard guard;
  static c10::impl::DeviceGuardImplRegistrar registrar(DeviceType::CUDA, &guard);
}
