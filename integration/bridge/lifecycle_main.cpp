// lifecycle_host as an ordinary program.
extern "C" int host_main(int argc, char** argv);

int main(int argc, char** argv) { return host_main(argc, argv); }
