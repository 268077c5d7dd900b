// ATen's operations on CUDA tensors, computed by torch's CPU kernels on the same memory, in the order of the stream.
//
// Each operation with a CUDA kernel gets one boxed kernel instead, which sees the arguments as CPU tensors over the
// same memory. Three ways, from the most like a GPU to the least:
//   - an operation that writes into its arguments is put on the stream;
//   - one that returns new tensors, on a busy or capturing stream: the meta kernel tells their shapes, they are
//     allocated, and the computation is put on the stream;
//   - else (shapes that depend on data, results that are no tensors, or simply an idle stream) the caller waits for it.
// What only allocates or makes views stays torch's own.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstring>
#include <exception>

#include "../cuda/streams.h"

namespace emulated {

EMULATED_EXPORT bool is_capturing(cudaStream_t stream);

namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// Operations that keep torch's own kernel, by the beginning of their name: they allocate, look, or copy by the runtime.
constexpr const char* kept[] = {
    "aten::empty",          "aten::_empty",    "aten::new_empty",   "aten::_efficientzerotensor",
    "aten::set_",           "aten::resize",    "aten::is_set_to",   "aten::_local_scalar_dense",
    "aten::record_stream",  "aten::is_pinned", "aten::_pin_memory", "aten::copy_",
    "aten::_copy",          "aten::_to_copy",  "aten::view",        "aten::as_strided",
    "aten::_reshape_alias",
};

cudaStream_t current_stream() { return c10::cuda::getCurrentCUDAStream().stream(); }

// --- arguments as other tensors ---

at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(at::kCPU);
  at::Tensor host = tensor.numel() ? at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(),
                                                   tensor.strides(), options)
                                   : at::empty_strided(tensor.sizes(), tensor.strides(), options);
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

at::Tensor as_meta(const at::Tensor& tensor) {
  bool is_number = tensor.defined() && tensor.dim() == 0 && tensor.is_cpu();
  if (!tensor.defined() || is_number) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

template <class Convert>
IValue converted(const IValue& value, c10::DeviceType to, Convert convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(convert(*tensor)) : tensor);
    return list;
  }
  if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(to);
  if (value.isGenerator()) return IValue();  // the CPU's own
  return value;
}
Stack converted_all(const Stack& arguments, c10::DeviceType to, at::Tensor (*convert)(const at::Tensor&)) {
  Stack result;
  for (auto& value : arguments) result.push_back(converted(value, to, convert));
  return result;
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  return value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>{value.toTensor()};
}

std::optional<c10::Device> device_of(const Stack& arguments) {
  std::optional<c10::Device> device;
  for (auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) return value.toTensor().device();
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector())
        if (tensor.is_cuda()) return tensor.device();
    if (!device && value.isDevice() && value.toDevice().is_cuda()) device = value.toDevice();
  }
  return device;
}

// --- computing ---

void call(const OperatorHandle& operation, Stack* stack) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::InferenceMode no_inference(false);
  at::NoGradGuard no_grad;
  operation.callBoxed(stack);
}

// Puts a computation on the current stream. An error in it is one of the arguments that torch's kernels check on the
// device, or the emulator's; it is printed, because nobody waits for it.
template <class Compute>
void compute_later(const OperatorHandle& operation, Compute compute) {
  C10_CUDA_CHECK(enqueue(current_stream(), Kind::kernel, [operation, compute]() mutable {
    try {
      compute();
    } catch (const std::exception& error) {
      fprintf(stderr, "emulated GPU: %s on a stream failed: %s\n", operation.schema().name().c_str(), error.what());
    }
  }));
  C10_CUDA_CHECK(cudaGetLastError());
}

// Has the stream do a computation and waits for it; an error is the caller's.
template <class Compute>
void compute_now(Compute compute) {
  std::exception_ptr error;
  C10_CUDA_CHECK(enqueue(current_stream(), Kind::kernel, [&] {
    try {
      compute();
    } catch (...) {
      error = std::current_exception();
    }
  }));
  C10_CUDA_CHECK(cudaStreamSynchronize(current_stream()));
  if (error) std::rethrow_exception(error);
}

// The arguments that an operation returns again, in the order of its results; nothing if some result is new.
std::optional<Stack> returned_arguments(const c10::FunctionSchema& schema, const Stack& arguments) {
  Stack results;
  for (auto& result : schema.returns()) {
    if (!result.alias_info()) return std::nullopt;
    for (size_t k = 0; k < arguments.size(); k++) {
      auto* alias = schema.arguments()[k].alias_info();
      if (!alias || alias->beforeSet() != result.alias_info()->beforeSet()) continue;
      results.push_back(arguments[k]);
      break;
    }
  }
  if (results.size() != schema.returns().size()) return std::nullopt;
  return results;
}

// Gives outputs the shape that the operation would: the CPU kernel sees borrowed memory, which it cannot resize.
void resize_outputs(const OperatorHandle& operation, const Stack& arguments, Stack& outputs) {
  auto& schema = operation.schema();
  bool has_outputs = false;
  for (auto& argument : schema.arguments()) has_outputs = has_outputs || argument.is_out();
  if (!has_outputs) return;
  try {
    Stack meta = converted_all(arguments, at::kMeta, as_meta);
    call(operation, &meta);
    for (size_t k = 0; k < outputs.size() && k < meta.size(); k++) {
      if (!meta[k].isTensor()) continue;
      at::Tensor output = outputs[k].toTensor();
      auto sizes = meta[k].toTensor().sizes();
      if (output.sizes() != sizes) output.resize_(sizes);
    }
  } catch (const std::exception&) {  // no meta kernel: the outputs must have the right shape already
  }
}

// New CUDA tensors for the results of an operation (tensors, and lists of them: _foreach_sqrt), by its meta kernel;
// nothing if that cannot tell.
std::optional<Stack> allocate_results(const OperatorHandle& operation, const Stack& arguments, c10::Device device) {
  for (auto& result : operation.schema().returns())
    if (!result.type()->isSubtypeOf(*c10::TensorType::get()) &&
        !result.type()->isSubtypeOf(*c10::ListType::ofTensors()))
      return std::nullopt;
  Stack meta = converted_all(arguments, at::kMeta, as_meta);
  try {
    call(operation, &meta);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  auto allocate = [&](const at::Tensor& shape) {
    return shape.defined() ? at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(device)) : shape;
  };
  Stack results;
  for (auto& value : meta) results.push_back(converted(value, at::kCUDA, allocate));
  return results;
}

void run(const OperatorHandle& operation, Stack* stack) {
  auto& schema = operation.schema();
  Stack arguments(stack->end() - schema.arguments().size(), stack->end());
  auto give = [&](const Stack& results) {
    torch::jit::drop(*stack, arguments.size());
    for (auto& result : results) stack->push_back(result);
  };
  std::optional<c10::Device> named = device_of(arguments);
  c10::OptionalDeviceGuard guard(named);
  c10::Device device = named.value_or(c10::Device(at::kCUDA, c10::cuda::getCurrentCUDAStream().device_index()));
  std::optional<Stack> returned = returned_arguments(schema, arguments);

  if (schema.is_mutable() && returned) {
    resize_outputs(operation, arguments, *returned);
    Stack host = converted_all(arguments, at::kCPU, on_host);
    compute_later(operation, [operation, host]() mutable { call(operation, &host); });
    give(*returned);
    return;
  }
  bool must_not_wait = is_capturing(current_stream()) || is_busy(current_stream());
  if (!schema.is_mutable() && schema.returns().size() && must_not_wait) {
    if (auto results = allocate_results(operation, arguments, device)) {
      Stack host = converted_all(arguments, at::kCPU, on_host);
      Stack into = converted_all(*results, at::kCPU, on_host);
      compute_later(operation, [operation, host, into]() mutable {
        call(operation, &host);
        for (size_t k = 0; k < into.size(); k++) {
          std::vector<at::Tensor> to = tensors_of(into[k]), from = tensors_of(host[k]);
          for (size_t i = 0; i < to.size(); i++)
            if (to[i].defined()) at::native::copy_(to[i], from[i].to(to[i].scalar_type()));
        }
      });
      give(*results);
      return;
    }
  }
  Stack host = converted_all(arguments, at::kCPU, on_host);
  compute_now([&] { call(operation, &host); });
  Stack results;
  auto to_device = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(device) : tensor; };
  for (size_t k = 0; k < host.size(); k++)
    results.push_back(returned ? (*returned)[k] : converted(host[k], at::kCUDA, to_device));
  give(results);
}

// copy_ of torch handles everything but copies within the device that change the type or the layout.
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  bool same_layout = to.scalar_type() == from.scalar_type() && to.is_contiguous() && from.is_contiguous() &&
                     to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg() && to.sizes() == from.sizes();
  if (!to.is_cuda() || !from.is_cuda() || same_layout) return at::native::copy_(to, from, non_blocking);
  c10::DeviceGuard guard(to.device());
  at::Tensor host_to = on_host(to), host_from = on_host(from);
  C10_CUDA_CHECK(enqueue(current_stream(), Kind::kernel, [host_to, host_from]() mutable {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    at::NoGradGuard no_grad;
    at::native::copy_(host_to, host_from, false);
  }));
  C10_CUDA_CHECK(cudaGetLastError());
  return to;
}

// --- registration, when the library is loaded ---

bool is_kept(const OperatorHandle& operation) {
  for (const char* name : kept)
    if (!operation.schema().name().compare(0, strlen(name), name)) return true;
  for (auto& result : operation.schema().returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;  // a view
  return false;
}

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

torch::Library* register_operations() {
  Silent silent;  // each registration warns that it replaces torch's kernel
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  auto* library = new torch::Library(torch::Library::IMPL, "aten", std::nullopt, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  int number = 0;
  for (auto& name : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    auto operation = dispatcher.findSchema(name);
    if (name.name.compare(0, 6, "aten::") || !operation || is_kept(*operation)) continue;
    std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    library->impl(full.c_str(), c10::DispatchKey::CUDA, torch::CppFunction::makeFromBoxedFunction<&run>());
    number++;
  }
  library->impl("copy_", c10::DispatchKey::CUDA, torch::CppFunction::makeFromUnboxedFunction(&copy));
  if (settings().cuda_verbose > 0) fprintf(stderr, "emulated GPU: %d operations are computed by the CPU\n", number);
  return library;  // for as long as the process lives
}

const torch::Library* registered = register_operations();

}  // namespace
}  // namespace emulated
