// Opens lifecycle_host as a plugin at run time, with local symbols, as a framework opens its extensions.
//
//   lifecycle_loader PLUGIN MODEL_DIR EXECUTABLE SCENARIO [ARGUMENT]
#include <dlfcn.h>

#include <cstdio>

int main(int argc, char** argv) {
  void* plugin = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (plugin == nullptr) {
    std::fprintf(stderr, "%s\n", argc > 1 ? dlerror() : "usage: lifecycle_loader PLUGIN ...");
    return 2;
  }
  using Main = int (*)(int, char**);
  const auto host_main = reinterpret_cast<Main>(dlsym(plugin, "host_main"));
  return host_main(argc - 1, argv + 1);
}
