// The view is a plain CPython type and no pybind11 class: an attribute read is one getter call, and an executor reads a
// dozen attributes per step.
#include "metadata_view.h"

#include <torch/csrc/autograd/python_variable.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace xllm_executor {

namespace py = pybind11;

namespace {

struct ViewObject {
  PyObject_HEAD
  const AttentionMetadata* metadata;  // null after the step
};

PyObject* wrap(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    Py_RETURN_NONE;
  }
  return THPVariable_Wrap(tensor);
}
PyObject* wrap(int64_t value) { return PyLong_FromLongLong(value); }
PyObject* wrap(bool value) { return PyBool_FromLong(value ? 1 : 0); }

template <class T>
PyObject* wrap(const std::optional<T>& value) {
  if (!value.has_value()) {
    Py_RETURN_NONE;
  }
  return wrap(*value);
}

class Accessor {
 public:
  explicit Accessor(std::string name) : name_(std::move(name)) {}
  virtual ~Accessor() = default;
  [[nodiscard]] virtual PyObject* get(const AttentionMetadata& metadata) const = 0;
  [[nodiscard]] const char* name() const noexcept { return name_.c_str(); }

 private:
  std::string name_;
};

template <class Member>
class MemberAccessor final : public Accessor {
 public:
  MemberAccessor(std::string name, Member AttentionMetadata::*member) : Accessor(std::move(name)), member_(member) {}
  [[nodiscard]] PyObject* get(const AttentionMetadata& metadata) const override { return wrap(metadata.*member_); }

 private:
  Member AttentionMetadata::*member_;
};

std::vector<std::unique_ptr<Accessor>> make_accessors() {
  std::vector<std::unique_ptr<Accessor>> accessors;
  using xllm_metadata::Property;
  const auto visit = [&]<class Member>(Property<Member AttentionMetadata::*> property) {
    const auto add = [&](std::string name) {
      accessors.push_back(std::make_unique<MemberAccessor<Member>>(std::move(name), property.member));
    };
    add(std::string(property.name));
    if (property.name == "qo_indptr") {
      add("q_cu_seq_lens");
    }
  };
  xllm_metadata::for_each_property_of<AttentionMetadata>(visit);
  return accessors;
}

PyObject* get_attribute(PyObject* self, void* closure) {
  const auto* accessor = static_cast<const Accessor*>(closure);
  const AttentionMetadata* metadata = reinterpret_cast<ViewObject*>(self)->metadata;
  if (metadata == nullptr) {
    PyErr_Format(PyExc_RuntimeError,
                 "attention metadata was read after its step (%s): its memory belongs to the C++ side and is valid only "
                 "inside execute; copy what must outlive it",
                 accessor->name());
    return nullptr;
  }
  try {
    return accessor->get(*metadata);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return nullptr;
  }
}

void dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyTypeObject* make_type() {
  // Never freed: the type refers to both and lasts until process exit.
  static const auto* accessors = new std::vector<std::unique_ptr<Accessor>>(make_accessors());
  static auto* getset = new std::vector<PyGetSetDef>();
  for (const auto& accessor : *accessors) {
    getset->push_back({accessor->name(), get_attribute, nullptr, nullptr, accessor.get()});
  }
  getset->push_back({nullptr, nullptr, nullptr, nullptr, nullptr});
  static char doc[] = "Attention metadata of the running step, owned by C++; satisfies xllm_metadata.AttentionMetadata.";
  PyType_Slot slots[] = {{Py_tp_getset, getset->data()},
                         {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                         {Py_tp_doc, doc},
                         {0, nullptr}};
  PyType_Spec spec = {"xllm_executor.AttentionMetadataView", sizeof(ViewObject), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (type == nullptr) {
    throw py::error_already_set();
  }
  return type;
}

}  // namespace

MetadataView::MetadataView(const AttentionMetadata& metadata) {
  static PyTypeObject* type = make_type();  // initialised under the GIL
  auto* view = PyObject_New(ViewObject, type);
  if (view == nullptr) {
    throw py::error_already_set();
  }
  view->metadata = &metadata;
  object_ = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(view));
}

MetadataView::~MetadataView() { reinterpret_cast<ViewObject*>(object_.ptr())->metadata = nullptr; }

}  // namespace xllm_executor
