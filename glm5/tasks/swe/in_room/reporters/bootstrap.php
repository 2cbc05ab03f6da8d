<?php
// Loads classes as composer.json of the repository says (autoload and autoload-dev), from its import roots, or from the
// folder of the test dependencies.
$root = getenv('APP_ROOT');
$read = @file_get_contents("$root/composer.json");
$composer = $read === false ? [] : (json_decode($read, true) ?: []);
$prefixes = $maps = $load = [];
foreach (['autoload', 'autoload-dev'] as $part) {
    $rules = $composer[$part] ?? [];
    foreach (['psr-4', 'psr-0'] as $kind) {
        foreach ($rules[$kind] ?? [] as $prefix => $folders) {
            foreach ((array) $folders as $folder) {
                $prefixes[] = [$prefix, "$root/" . rtrim($folder, '/'), $kind];
            }
        }
    }
    foreach ($rules['classmap'] ?? [] as $path) {
        $maps[] = "$root/$path";
    }
    foreach ($rules['files'] ?? [] as $path) {
        $load[] = "$root/$path";
    }
}
usort($prefixes, fn ($a, $b) => strlen($b[0]) <=> strlen($a[0]));
$classes = null;
$scan = function () use ($maps, $root): array {
    $found = [];
    foreach ($maps as $path) {
        $files = is_dir($path)
            ? new RegexIterator(new RecursiveIteratorIterator(new RecursiveDirectoryIterator($path)), '/\.php$/')
            : [$path];
        foreach ($files as $file) {
            $text = (string) @file_get_contents((string) $file);
            $space = preg_match('/^\s*namespace\s+([\w\\\\]+)\s*;/m', $text, $match) ? $match[1] . '\\' : '';
            preg_match_all('/^\s*(?:(?:abstract|final|readonly)\s+)*(?:class|interface|trait|enum)\s+(\w+)/m', $text, $names);
            foreach ($names[1] as $name) {
                $found[$space . $name] = (string) $file;
            }
        }
    }
    return $found;
};
spl_autoload_register(function (string $class) use ($prefixes, $scan, &$classes): void {
    foreach ($prefixes as [$prefix, $folder, $kind]) {
        if ($prefix !== '' && strncmp($class, $prefix, strlen($prefix)) !== 0) {
            continue;
        }
        $rest = $kind === 'psr-4' ? substr($class, strlen($prefix)) : $class;
        $file = $folder . '/' . str_replace('\\', '/', $rest) . '.php';
        if (!is_file($file) && $kind === 'psr-0') {
            $file = $folder . '/' . str_replace(['\\', '_'], '/', $rest) . '.php';
        }
        if (is_file($file)) {
            require_once $file;
            return;
        }
    }
    $classes ??= $scan();
    $file = $classes[$class] ?? getenv('APP_SITE') . '/php/' . str_replace('\\', '/', $class) . '.php';
    if (is_file($file)) {
        require_once $file;
    }
});
set_include_path(implode(PATH_SEPARATOR, array_filter([getenv('APP_PATHS'), get_include_path()])));
foreach ($load as $file) {
    require_once $file;
}
