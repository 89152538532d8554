// swift-tools-version: 6.0
import PackageDescription

let package = Package(
    name: "SpeculativeStreaming",
    platforms: [.macOS(.v15), .iOS(.v18)],
    products: [
        .library(name: "SpeculativeStreaming", targets: ["SpeculativeStreaming"])
    ],
    dependencies: [
        .package(url: "https://github.com/huggingface/swift-transformers", from: "1.0.0")
    ],
    targets: [
        .target(
            name: "SpeculativeStreaming",
            dependencies: [.product(name: "Tokenizers", package: "swift-transformers")]
        ),
        .executableTarget(name: "Ask", dependencies: ["SpeculativeStreaming"]),
    ]
)
